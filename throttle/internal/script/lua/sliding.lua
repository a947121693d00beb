-- sliding.lua: no span of `period` ever has more than `limit` units.
-- Source: the sliding window log. It keeps the times of the grants that still count.
--
--   parameters  p1 limit (units), p2 period (us, margin included)
--   payload     used(7) entry*
--   entry       time(7) units(7), oldest first; a time occurs once
--
-- A cut of the limit removes no entry: a limit that is cut and raised again has forgotten nothing.
--
-- Above ENTRIES entries, or ENTRIES/2 if the limit is above ENTRIES, a grant joins the newest entry if both are in
-- the same tick of 2 * period/ENTRIES. The entry gets the later time, so a unit counts up to one tick longer, never
-- shorter. So a value has at most some 4 kB, whatever the limit. The first entries are exact: otherwise a burst in
-- every period would start later each time, by the time between the grants that were merged.
--
-- In the state, `time` and `units` are the newest entry; units: 0 if there is none. The others are
-- log.data[log.first .. log.last], a part of the value as it was read, and then log.tail: the entry that was newest
-- before `time` was charged, or nothing. Without others, log is nil.

do

local ENTRIES, ENTRY = 192, 14 -- how many, and bytes of one

-- flatten moves the tail into the data.
local function flatten(log)
  if log.tail == '' then return end
  log.data = sub(log.data, log.first, log.last) .. log.tail
  log.first, log.last, log.tail = 1, #log.data, ''
end

-- same_tick returns whether a time is in the tick of a later one.
local function same_tick(st, time, later)
  return time >= later - later % floor(2 * st.period / ENTRIES)
end

algorithms['s'] = {
  load = function(p1, p2, p3, p4, now, data, from, to)
    local st = {limit = p1, period = p2, used = 0, time = 0, units = 0, log = nil}
    if not data then return st end
    local first, last = from + 7, to - ENTRY -- of the entries without the newest one
    if last + 1 < first or (last + 1 - first) % ENTRY ~= 0 then return nil end
    local ended, time = now - p2, unpack7(data, last + 1) -- grants at `ended` or before count no more
    if time <= ended then return st end
    local used = unpack7(data, from)
    while first <= last and unpack7(data, first) <= ended do
      used = used - unpack7(data, first + 7)
      first = first + ENTRY
    end
    st.used, st.time, st.units = used, time, unpack7(data, last + 8)
    if first <= last then st.log = {data = data, first = first, last = last, tail = ''} end
    return st
  end,

  -- In an endless queue a unit goes one period after the unit that is `limit` units ahead of it: `cycles` counts these
  -- periods back, to a unit that counts already, or has room now. Where all tickets ahead cost `each`, a period
  -- has room for whole tickets only. With a limit of 3 in 60 s and grants at 0, 10 and 20 s, the unit after 4 others
  -- is the 8th: it goes two periods after the 2nd, at 130 s.
  fits_at = function(st, now, cost, ahead, each)
    local limit, unit = st.limit, st.used + ahead + cost
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
      if unit > 0 then -- a period after the unit-th oldest of those that count
        local log, seen = st.log, 0
        if log then
          flatten(log)
          for i = log.first, log.last, ENTRY do
            seen = seen + unpack7(log.data, i + 7)
            if seen >= unit then return unpack7(log.data, i) + cycles * st.period end
          end
        end
        return st.time + cycles * st.period
      end
      cycles = cycles - 1 -- that was one step too many: the unit one step later has room now
    end
    return now + cycles * st.period
  end,

  charge = function(st, now, cost)
    if cost > MOST - st.used then cost = MOST - st.used end
    if cost == 0 then return end
    local time, units, log = st.time, st.units, st.log
    st.used = st.used + cost
    if units > 0 then
      local merges = time >= now -- a time occurs once
      if log and not merges and same_tick(st, time, now) then
        local most = st.limit > ENTRIES and ENTRIES / 2 or ENTRIES
        merges = log.last - log.first + 1 + #log.tail >= most * ENTRY
      end
      if merges then
        st.time, st.units = max(time, now), units + cost
        return
      end
      log = log or {data = '', first = 1, last = 0, tail = ''}
      st.log = log
      flatten(log)
      log.tail = pack7(time) .. pack7(units)
    end
    st.time, st.units = now, cost
  end,

  resets_at = function(st, now) return st.units > 0 and st.time + st.period or now end,

  payload = function(st)
    local log, used, newest = st.log, pack7(st.used), pack7(st.time) .. pack7(st.units)
    if not log then return used .. newest end
    return used, sub(log.data, log.first, log.last), log.tail .. newest
  end,

  grants = function(st, at)
    local parts, payload = {}, concat({algorithms['s'].payload(st)})
    for i = 8, #payload, ENTRY do
      local time, units = unpack7(payload, i), unpack7(payload, i + 7)
      if time >= at and units > 0 then parts[#parts + 1] = format('%d/%d,', time, units) end
    end
    return concat(parts)
  end,

  give_back = function(st, now, at, cost)
    if st.units == 0 or at > st.time or at + st.period <= now then return end
    -- The units are in the first entry of `at` or later: at `in_log` in log.data, or, if that is nil, the newest one.
    local log, time, units, in_log = st.log, st.time, st.units, nil
    if log then
      flatten(log)
      local i = log.last + 1
      while i > log.first and unpack7(log.data, i - ENTRY) >= at do i = i - ENTRY end
      if i <= log.last then in_log, time, units = i, unpack7(log.data, i), unpack7(log.data, i + 7) end
    end
    if time ~= at and not (st.limit > ENTRIES and same_tick(st, at, time)) then return end -- they count no more
    local back = min(units, cost)
    st.used = st.used - back
    if in_log then
      local left = back < units and pack7(time) .. pack7(units - back) or ''
      log.data = sub(log.data, log.first, in_log - 1) .. left .. sub(log.data, in_log + ENTRY, log.last)
      log.first, log.last = 1, #log.data
    elseif back < units or not log then
      st.units = units - back
    else -- nothing is left of the newest entry: the last one of the log becomes the newest
      log.last = log.last - ENTRY
      st.time, st.units = unpack7(log.data, log.last + 1), unpack7(log.data, log.last + 8)
    end
    if log and log.last < log.first then st.log = nil end
  end,
}
end
