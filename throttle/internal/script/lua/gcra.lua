-- gcra.lua: `burst` units at once, then one unit every period/limit. Source: the generic cell rate algorithm (ITU-T
-- I.371, the continuous-state leaky bucket form), in integers: no rounding error ever adds up.
--
--   parameters  p1 burst (units at once), p2 span (us), p3 drain (units a span), p4 period (us); p2/p3: lowest terms
--   payload     time(7) units(7) parts(7) span(7): the level is units + parts/span, parts < span
--
-- A limit of 200 in 60 s drains 1 unit in a span of 300,000 us: 0.1 s after one grant of 20 units the level is 19 units
-- and 200,000 parts. It is two numbers, as burst x span can be far above 2^53, up to which doubles are exact.

do

local TOP = 281474976710656 -- 2^48, the weight of the first of nine digits of 6 bits

-- scale_by(a, b, c) -> floor(a * b / c) and the rest, exactly: a and b at most 2^53, c below 2^46 (the span is at
-- most twice the longest period, the drain at most 10^12). A quotient above 2^53 is not exact: no time or level is so
-- high. Where a * b is too large, it is divided as by hand, digit by digit of `a`. 25 * 7 / 9, in decimal digits: 2 * 7
-- is 1 * 9, rest 5; 10 * 5 + 5 * 7 is 9 * 9, rest 4: so 19, rest 4. No dividend is above 64 c + 63 c, below 2^53.
local function scale_by(a, b, c)
  local whole = floor(b / c)
  b = b - whole * c -- below c: the quotient of the rest is added to a * whole
  if a * b < MOST then
    local rest = a * b % c
    return a * whole + (a * b - rest) / c, rest
  end
  local quotient, rest, left, weight = 0, 0, a, TOP
  for _ = 1, 9 do
    local digit = floor(left / weight)
    local dividend = rest * 64 + digit * b
    rest = dividend % c
    quotient = quotient * 64 + (dividend - rest) / c
    left, weight = left - digit * weight, weight / 64
  end
  return a * whole + quotient, rest
end

-- drain_time returns the us in which units and parts drain, rounded up.
local function drain_time(st, units, parts)
  local time, rest = scale_by(min(units, MOST), st.span, st.drain)
  return time + ceil((rest + parts) / st.drain)
end

-- subtract returns a level less another one, or 0 if that is higher.
local function subtract(st, units, parts, other_units, other_parts)
  units, parts = units - other_units, parts - other_parts
  if parts < 0 then units, parts = units - 1, parts + st.span end
  if units < 0 then return 0, 0 end
  return units, parts
end

-- level_after returns what is left of a level when it has drained for `time`.
local function level_after(st, time, units, parts)
  if time <= 0 then return units, parts end
  return subtract(st, units, parts, scale_by(time, st.drain, st.span))
end

local function set_level(st, units, parts)
  st.units, st.parts, st.used = units, parts, units + (parts > 0 and 1 or 0)
end

algorithms['g'] = {
  drains = true,
  load = function(p1, p2, p3, p4, now, data, from, to)
    local st = {limit = p1, span = p2, drain = p3, stated = p4, units = 0, parts = 0, used = 0, period = p1 * p2 / p3}
    if data then
      if to - from ~= 27 then return nil end
      local units, parts, span = unpack7(data, from + 7), unpack7(data, from + 14), unpack7(data, from + 21)
      -- The rate has changed: a part of a unit counts as a whole one.
      if span ~= p2 and parts > 0 then units, parts = units + 1, 0 end
      set_level(st, level_after(st, now - unpack7(data, from), units, parts))
    end
    return st
  end,

  fits_at = function(st, now, cost, ahead)
    local over = st.units + cost + ahead - st.limit
    if over < 0 or over == 0 and st.parts == 0 then return now end
    return min(now + drain_time(st, over, st.parts), MOST)
  end,

  charge = function(st, now, cost) set_level(st, min(st.units + cost, MOST), st.parts) end,

  -- Units that have drained since the grant are not given back, as others may have got their room.
  give_back = function(st, now, at, cost)
    set_level(st, subtract(st, st.units, st.parts, level_after(st, now - at, cost, 0)))
  end,

  resets_at = function(st, now) return min(now + drain_time(st, st.units, st.parts), MOST) end,

  payload = function(st, now) return pack7(now) .. pack7(st.units) .. pack7(st.parts) .. pack7(st.span) end,
}
end
