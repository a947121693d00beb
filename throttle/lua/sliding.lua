-- sliding.lua: no span of `period` ever holds more than `limit` units, exactly.
-- Source: the sliding window log. Kept is the time of every grant that still counts.
--
--   parameters  limit (units), period (us, margin included), unused, unused
--   payload     width(1) used(7) entry*
--   entry       time(7) units(width - 7), oldest first; a time occurs once
--
-- An entry is 8 bytes wide until one of them needs more than 255 units, then 12.
-- Entries leave by age only, so a limit that is cut and raised again has forgotten nothing.
-- From EXACT entries on, new times are rounded up to the next 1024th of the period and merged,
-- which bounds the value and can only make the window stricter.

local EXACT = 1024
local UNITS_MAX = 1099511627775

local function entry_units(data, i, width)
  if width == 8 then return byte(data, i + 7) end
  return unpack5(data, i + 7)
end

local function pack_entry(time, units, width)
  if width == 8 then return pack7(time) .. char(units) end
  return pack7(time) .. pack5(units)
end

local function widen(st)
  local wide = {}
  for i = st.first, #st.data, st.width do
    wide[#wide + 1] = pack_entry(unpack7(st.data, i), entry_units(st.data, i, 8), 12)
  end
  st.data, st.first, st.width = table.concat(wide), 1, 12
end

-- The place of the first entry whose time is not before `time`, or one past the end.
local function first_not_before(st, time)
  local lo, hi = 0, (#st.data - st.first + 1) / st.width
  while lo < hi do
    local mid = floor((lo + hi) / 2)
    if unpack7(st.data, st.first + mid * st.width) < time then lo = mid + 1 else hi = mid end
  end
  return st.first + lo * st.width
end

-- The time of the unit-th oldest unit, 1 <= unit <= used.
local function time_of_unit(st, unit)
  local n = (#st.data - st.first + 1) / st.width
  if n == st.used then return unpack7(st.data, st.first + (unit - 1) * st.width) end
  local i, seen = st.first, 0
  repeat
    seen = seen + entry_units(st.data, i, st.width)
    i = i + st.width
  until seen >= unit
  return unpack7(st.data, i - st.width)
end

algorithms['s'] = {
  readable = function(payload)
    local width = byte(payload, 1)
    return #payload >= 8 and (width == 8 or width == 12) and (#payload - 8) % width == 0
  end,

  load = function(w, payload, now)
    w.limit, w.period = w.p1, w.p2
    local st = {width = 8, used = 0, data = '', first = 1}
    if payload then
      st.width, st.used, st.data, st.first = byte(payload, 1), unpack7(payload, 2), payload, 9
      local dead = now - w.period
      while st.first <= #payload and unpack7(payload, st.first) <= dead do
        st.used = st.used - entry_units(payload, st.first, st.width)
        st.first = st.first + st.width
      end
      if st.first > #payload then st.width = 8 end
    end
    return st
  end,

  -- Unit number u of an endless queue goes one period after unit u - limit does.
  fits_at = function(w, st, now, from, cost, ahead)
    local unit = st.used + ahead + cost
    if unit <= w.limit then return from end
    local periods = ceil((ahead + cost) / w.limit)
    unit = unit - periods * w.limit
    if unit <= 0 then return max(from, now + (periods - 1) * w.period) end
    return max(from, time_of_unit(st, unit) + periods * w.period)
  end,

  take = function(w, st, now, cost)
    local n, time = (#st.data - st.first + 1) / st.width, now
    if n >= EXACT then
      local tick = ceil(w.period / 1024)
      time = ceil(now / tick) * tick
    end
    local units, before, tail = cost, 0, #st.data
    if n > 0 then
      local newest = tail - st.width + 1
      local t = unpack7(st.data, newest)
      if t >= time then
        before = entry_units(st.data, newest, st.width)
        time, units, tail = t, before + cost, newest - 1
      end
    end
    units = min(units, UNITS_MAX)
    if units > 255 and st.width == 8 then
      st.data = sub(st.data, st.first, tail)
      st.first = 1
      widen(st)
      tail = #st.data
    end
    st.data = sub(st.data, st.first, tail) .. pack_entry(time, units, st.width)
    st.first = 1
    st.used = st.used + units - before
  end,

  give_back = function(w, st, now, at, cost)
    if at + w.period <= now then return 0 end
    local i = first_not_before(st, at)
    if i > #st.data then return 0 end
    local time, tick = unpack7(st.data, i), ceil(w.period / 1024)
    if time ~= at and (time % tick ~= 0 or time - at >= tick) then return 0 end
    local units = entry_units(st.data, i, st.width)
    local back = min(units, cost)
    local left = back < units and pack_entry(time, units - back, st.width) or ''
    st.data = sub(st.data, st.first, i - 1) .. left .. sub(st.data, i + st.width)
    st.first = 1
    st.used = st.used - back
    return back
  end,

  capacity = function(w) return w.limit end,

  used = function(w, st) return st.used end,

  resets_at = function(w, st, now)
    if st.first > #st.data then return now end
    return unpack7(st.data, #st.data - st.width + 1) + w.period
  end,

  payload = function(w, st) return char(st.width) .. pack7(st.used) .. sub(st.data, st.first) end,
}
