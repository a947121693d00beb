-- line_units.lua: the units that the tickets of a flow or a node cost together.
--
-- A tally is a flow or a node. It has n, the number of its tickets, and one of these:
--   same    the costs of every ticket (windows.costs_of), while all cost the same
--   units   by unit {sum, least, most}: the least and the most cost of one ticket so far
-- Its text is "requests=1" in the first case, and "requests=3/1/2,..." in the second.

local line_units = {
  -- parse reads the text into a tally whose n is known.
  parse = function(call, tally, text)
    if tally.n == 0 then return end
    if not find(text, '/', 1, true) then
      tally.same = windows.costs_of(call, text)
      return
    end
    tally.units = {}
    for unit, sum, least, most in gmatch(text, '([^=,]+)=(%d+)/(%d+)/(%d+)') do
      tally.units[unit] = {sum + 0, least + 0, most + 0}
    end
  end,

  text = function(tally)
    if tally.same then return tally.same.text end
    local parts = {}
    for unit, u in pairs(tally.units or {}) do parts[#parts + 1] = format('%s=%d/%d/%d', unit, unpack(u)) end
    return parts[1] and concat(parts, ',') or '-'
  end,

  -- count adds a ticket's costs (1), or subtracts them (-1).
  count = function(tally, costs, sign)
    local n = tally.n + sign
    tally.n, tally.changed = n, true
    if n <= 0 then
      tally.n, tally.same, tally.units, tally.moved = 0, false, false, true -- moved: a node drops its tags
    elseif n == 1 and sign == 1 then
      tally.same = costs
    elseif tally.same ~= costs then
      tally.units = tally.units or {}
      for unit, cost in pairs(tally.same and tally.same.units or {}) do
        tally.units[unit] = {cost * (n - sign), cost, cost} -- of all until now
      end
      tally.same = false
      for unit, u in pairs(tally.units) do if not costs.units[unit] then u[2] = 0 end end
      for unit, cost in pairs(costs.units) do
        local u = tally.units[unit] or {0, 0, cost} -- the others cost nothing of it
        tally.units[unit] = u
        u[1] = max(0, min(u[1] + sign * cost, MOST))
        u[2], u[3] = min(u[2], cost), max(u[3], cost)
      end
    end
  end,

  -- of_unit returns the sum, the least and the most of a unit; if no ticket costs any, what min and max ignore.
  of_unit = function(tally, unit)
    local cost, u = tally.same and tally.same.units[unit], tally.units and tally.units[unit]
    if cost then return cost * tally.n, cost, cost end
    if u then return unpack(u) end
    return 0, MOST, 0
  end,
}
