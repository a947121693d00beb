-- sliding.lua: no span of `period` ever holds more than `limit` units.
-- Source: the sliding window log. Kept are the times of the grants that still count.
--
--   parameters  p1 limit (units), p2 period (us, margin included)
--   payload     width(1) used(7) [began(7)] entry*
--   entry       time(7) units(width - 7), oldest first; a time occurs once
--
-- An entry is 8 bytes wide until one of them needs more than 255 units, then 14. MERGED is added to
-- the width if `began` follows.
-- Entries leave by age only, so a limit that is cut and raised again has forgotten nothing.
--
-- Above a limit of ENTRIES, and from ENTRIES/2 entries on, a grant joins the newest entry if that
-- `began` less than a tick ago, and the entry takes the later time. Each unit counts up to one tick
-- of 2 * period/ENTRIES longer, never shorter. So a value has at most some 1.8 kB, whatever the
-- limit. The first entries are exact: a burst that comes back in every period, taken in pieces,
-- would else lose the time between its first pieces in each of them.

do
local byte, char, sub = string.byte, string.char, string.sub
local floor, ceil, min, max = math.floor, math.ceil, math.min, math.max
local pack7, unpack7, MOST = codec.pack7, codec.unpack7, codec.MOST

local ENTRIES = 128
local MERGED = 128

-- entry_units returns the units of the entry at a place.
local function entry_units(data, i, width)
  if width == 8 then return byte(data, i + 7) end
  return unpack7(data, i + 7)
end

-- pack_entry returns an entry as bytes.
local function pack_entry(time, units, width)
  if width == 8 then return pack7(time) .. char(units) end
  return pack7(time) .. pack7(units)
end

-- close_newest puts the newest entry, which a call may have opened to count in, back behind the
-- others.
local function close_newest(st)
  if not st.time then return end
  if st.units > 255 and st.width == 8 then
    local wide = {}
    for i = st.first, #st.data, 8 do wide[#wide + 1] = sub(st.data, i, i + 6) .. pack7(byte(st.data, i + 7)) end
    st.data, st.first, st.width = table.concat(wide), 1, 14
  end
  st.data = sub(st.data, st.first) .. pack_entry(st.time, st.units, st.width)
  st.first, st.time = 1, nil
end

local function tick(st) return 2 * st.period / ENTRIES end

-- joins tells whether a grant joins the newest entry.
local function joins(st, now)
  local most = st.limit > ENTRIES and ENTRIES / 2 or ENTRIES
  return #st.data - st.first >= most * st.width and now - st.began < tick(st)
end

algorithms['s'] = {
  readable = function(payload)
    local width = byte(payload, 1)
    local head = width and width > MERGED and 15 or 8
    width = width and width % MERGED
    return #payload >= head and (width == 8 or width == 14) and (#payload - head) % width == 0
  end,

  load = function(p1, p2, p3, p4, payload, now)
    local st = {limit = p1, period = p2, width = 8, used = 0, began = 0, data = '', first = 1, time = nil, units = nil}
    if not payload then return st end
    local width, used, first, len, dead, began = byte(payload, 1), unpack7(payload, 2), 9, #payload, now - p2, 0
    if width > MERGED then
      width, first, began = width - MERGED, 16, unpack7(payload, 9)
    end
    while first <= len and unpack7(payload, first) <= dead do
      used = used - entry_units(payload, first, width)
      first = first + width
    end
    if first <= len then st.width, st.used, st.began, st.data, st.first = width, used, began, payload, first end
    return st
  end,

  -- Unit number u of an endless queue goes one period after unit u - limit does. Where all tickets
  -- ahead cost `each`, a period holds only whole ones of them.
  fits_at = function(st, now, from, cost, ahead, each)
    local limit = st.limit
    local unit = st.used + ahead + cost
    if unit <= limit then return from end
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
        local i, seen, data, width = st.first, 0, st.data, st.width
        while i <= #data do
          seen = seen + entry_units(data, i, width)
          if seen >= unit then return max(from, unpack7(data, i) + cycles * st.period) end
          i = i + width
        end
        return max(from, st.time + cycles * st.period)
      end
      cycles = cycles - 1
    end
    return max(from, now + cycles * st.period)
  end,

  rid_at = function(st, start) return start + st.period end,

  take = function(st, now, cost)
    cost = min(cost, MOST - st.used)
    local time = st.time
    if time == now then
      st.units, st.used = st.units + cost, st.used + cost
      return
    end
    if not time then
      local at = #st.data - st.width + 1
      if at >= st.first then -- open the newest
        time, st.units = unpack7(st.data, at), entry_units(st.data, at, st.width)
        if time >= now or joins(st, now) then
          st.time = time
          st.data = sub(st.data, st.first, at - 1)
          st.first = 1
        end
      end
    end
    if st.time and (time >= now or joins(st, now)) then
      st.time, st.units, st.used = max(time, now), st.units + cost, st.used + cost
      return
    end
    close_newest(st)
    st.time, st.units, st.began, st.used = now, cost, now, st.used + cost
  end,

  give_back = function(st, now, at, cost)
    if at + st.period <= now then return 0 end
    close_newest(st)
    local data, width, i = st.data, st.width, st.first
    local lo, hi = 0, (#data - i + 1) / width
    while lo < hi do
      local mid = floor((lo + hi) / 2)
      if unpack7(data, i + mid * width) < at then lo = mid + 1 else hi = mid end
    end
    i = i + lo * width
    if i > #data then return 0 end
    local time = unpack7(data, i)
    if time ~= at and not (st.limit > ENTRIES and time - at < tick(st)) then return 0 end
    local units = entry_units(data, i, width)
    local back = min(units, cost)
    local left = back < units and pack_entry(time, units - back, width) or ''
    st.data = sub(data, st.first, i - 1) .. left .. sub(data, i + width)
    st.first = 1
    st.used = st.used - back
    return back
  end,

  longest = function(window) return ceil(2 * window.p2 / 1000000) end,

  capacity = function(st) return st.limit end,

  used = function(st) return st.used end,

  resets_at = function(st, now)
    if st.time then return st.time + st.period end
    if st.first > #st.data then return now end
    return unpack7(st.data, #st.data - st.width + 1) + st.period
  end,

  -- The newest entry is joined here, not before: every copy of a long value costs time.
  payload = function(st)
    if st.time and st.units > 255 then close_newest(st) end -- which may widen the others
    local newest = st.time and pack_entry(st.time, st.units, st.width) or ''
    if st.limit > ENTRIES or #st.data + #newest - st.first >= ENTRIES * st.width then
      return char(st.width + MERGED) .. pack7(st.used) .. pack7(st.began) .. sub(st.data, st.first) .. newest
    end
    return char(st.width) .. pack7(st.used) .. sub(st.data, st.first) .. newest
  end,
}
end
