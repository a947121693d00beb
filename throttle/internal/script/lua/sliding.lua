-- sliding.lua: no span of `period` ever holds more than `limit` units.
-- Source: the sliding window log. Kept are the times of the grants that still count.
--
--   parameters  p1 limit (units), p2 period (us, margin included)
--   payload     width(1) used(7) entry*
--   entry       time(7) units(width - 7), oldest first; a time occurs once
--
-- An entry is 8 bytes wide until one of them needs more than 255 units, then 14. Entries leave by age
-- only, so a limit that is cut and raised again has forgotten nothing.
--
-- Above a limit of ENTRIES, and from ENTRIES/2 entries on, a grant joins the newest entry if that is of
-- the same tick of the clock, and the entry takes the later time. Each unit counts up to one tick
-- of 2 * period/ENTRIES longer, never shorter. So a value has at most some 2.7 kB, whatever the
-- limit. The first entries are exact: a burst that comes back in every period, taken in pieces,
-- would else lose the time between its first pieces in each of them.
--
-- In the state, `time` and `units` are the newest entry, 0 if there is none. The others are
-- data[first .. last], a part of the scope's value as it was read, and then `tail`: an entry that
-- was the newest one until now, or nothing.

do

local ENTRIES = 192

-- entry_units returns the units of the entry at an offset.
local function entry_units(data, i, width)
  if width == 8 then return byte(data, i + 7) end
  return unpack7(data, i + 7)
end

-- flatten joins the entries but the newest in one text, of that width.
local function flatten(log, width)
  local data, first, last = log.data, log.first, log.last
  if log.tail ~= '' then
    data = sub(data, first, last) .. log.tail
    first, last = 1, #data
  end
  if width > log.width then
    local wide = {}
    for i = first, last, 8 do wide[#wide + 1] = sub(data, i, i + 6) .. pack7(byte(data, i + 7)) end
    log.width = width
    data = concat(wide)
    first, last = 1, #data
  end
  log.data, log.first, log.last, log.tail = data, first, last, ''
end

-- same_tick tells whether a time is in the tick of a later one.
local function same_tick(st, time, later)
  return time >= later - later % floor(2 * st.period / ENTRIES)
end

algorithms['s'] = {
  load = function(p1, p2, p3, p4, now, data, from, to)
    local st = {limit = p1, period = p2, used = 0, time = 0, units = 0, log = nil}
    if not data then return st end
    local width = byte(data, from)
    local known = width == 8 or width == 14
    local first, last = from + 8, to - (width or 0) -- of the entries before the newest one
    if not known or last + 1 < first or (last + 1 - first) % width ~= 0 then return nil end
    local dead, time = now - p2, unpack7(data, last + 1)
    if time <= dead then return st end
    local used = unpack7(data, from + 1)
    while first <= last and unpack7(data, first) <= dead do
      used = used - entry_units(data, first, width)
      first = first + width
    end
    st.used, st.time, st.units = used, time, entry_units(data, last + 1, width)
    if first <= last then st.log = {data = data, first = first, last = last, width = width, tail = ''} end
    return st
  end,

  -- Unit number u of an endless queue goes one period after unit u - limit does. Where all tickets
  -- ahead cost `each`, a period holds only whole ones of them.
  fits_at = function(st, now, cost, ahead, each)
    local limit = st.limit
    local unit = st.used + ahead + cost
    if unit <= limit then return now end
    local cycles = 0
    if each > 1 and ahead >= each then
      local whole, tickets = max(1, floor(limit / each)), floor(ahead / each)
      cycles = floor(tickets / whole)
      ahead = (tickets - cycles * whole) * each
      unit = st.used + ahead + cost
    end
    if unit > limit then
      local periods = ceil((ahead + cost) / limit)
      unit = unit - periods * limit
      cycles = cycles + periods
      if unit > 0 then -- it waits for the unit-th oldest one
        local log, seen = st.log, 0
        if log then
          flatten(log, log.width)
          local data, width = log.data, log.width
          for i = log.first, log.last, width do
            seen = seen + entry_units(data, i, width)
            if seen >= unit then return unpack7(data, i) + cycles * st.period end
          end
        end
        return st.time + cycles * st.period
      end
      cycles = cycles - 1
    end
    return now + cycles * st.period
  end,

  take = function(st, now, cost)
    if cost > MOST - st.used then cost = MOST - st.used end
    if cost == 0 then return end
    local time, units, log = st.time, st.units, st.log
    st.used = st.used + cost
    if units > 0 then
      local merges = time >= now
      if log and not merges and same_tick(st, time, now) then
        local exact = st.limit > ENTRIES and ENTRIES / 2 or ENTRIES
        merges = log.last - log.first + 1 + #log.tail >= exact * log.width
      end
      if merges then
        st.time, st.units = max(time, now), units + cost
        return
      end
      if not log then
        log = {data = '', first = 1, last = 0, width = units > 255 and 14 or 8, tail = ''}
        st.log = log
      elseif log.tail ~= '' or units > 255 then
        flatten(log, units > 255 and 14 or log.width)
      end
      log.tail = pack_time(time) .. (log.width == 8 and char(units) or pack7(units))
    end
    st.time, st.units = now, cost
  end,

  resets_at = function(st, now) return st.units > 0 and st.time + st.period or now end,

  payload = function(st, now)
    local log, units = st.log, st.units
    if log and units > 255 then flatten(log, 14) end
    local width = log and log.width or units > 255 and 14 or 8
    local head = char(width) .. pack7(st.used)
    units = width == 8 and char(units) or pack7(units)
    if not log then return head .. pack_time(st.time) .. units end
    return head, sub(log.data, log.first, log.last), log.tail .. pack_time(st.time) .. units
  end,

  grants = function(st, at)
    local parts, log = {}, st.log
    if log then
      flatten(log, log.width)
      for i = log.first, log.last, log.width do
        local time = unpack7(log.data, i)
        if time >= at then parts[#parts + 1] = format('%d/%d,', time, entry_units(log.data, i, log.width)) end
      end
    end
    if st.time >= at and st.units > 0 then parts[#parts + 1] = format('%d/%d,', st.time, st.units) end
    return concat(parts)
  end,

  give_back = function(st, now, at, cost)
    if st.units == 0 or at > st.time or at + st.period <= now then return end
    local log, time, i = st.log, st.time, nil
    local held = st.units
    if log then
      flatten(log, log.width)
      local data, width, first = log.data, log.width, log.first
      local lo, hi = 0, (log.last - first + 1) / width
      while lo < hi do
        local mid = floor((lo + hi) / 2)
        if unpack7(data, first + mid * width) < at then lo = mid + 1 else hi = mid end
      end
      i = first + lo * width
      if i <= log.last then time, held = unpack7(data, i), entry_units(data, i, width) else i = nil end
    end
    if time ~= at and not (st.limit > ENTRIES and same_tick(st, at, time)) then return end
    local back = min(held, cost)
    st.used = st.used - back
    if i then
      local left = ''
      if back < held then
        left = pack7(time) .. (log.width == 8 and char(held - back) or pack7(held - back))
      end
      log.data = sub(log.data, log.first, i - 1) .. left .. sub(log.data, i + log.width, log.last)
      log.first, log.last = 1, #log.data
    else
      st.units = st.units - back
      if st.units == 0 then
        st.time = 0
        if log then -- the newest one is now the last of the others
          log.last = log.last - log.width
          st.time = unpack7(log.data, log.last + 1)
          st.units = entry_units(log.data, log.last + 1, log.width)
        end
      end
    end
    if log and log.last < log.first then st.log = nil end
  end,
}
end
