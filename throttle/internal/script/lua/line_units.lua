-- line_units.lua: how many units the tickets of a flow or of a node cost together.
--
-- What is counted is a table `of` with n, how many tickets, and one of these:
--   same    the costs of every ticket (windows.costs_of), while all cost the same
--   units   by unit {sum, least and most of one ticket's cost}; least and most never shrink again
-- Its text is "requests=1" in the first case, and "requests=3/1/2,..." in the second.

local line_units = {
  -- parse reads the text into `of`, whose n is known.
  parse = function(call, of, text)
    if of.n == 0 then return end
    if not find(text, '/', 1, true) then
      of.same = windows.costs_of(call, text)
      return
    end
    of.units = {}
    for unit, sum, least, most in gmatch(text, '([^=,]+)=(%d+)/(%d+)/(%d+)') do
      of.units[unit] = {sum + 0, least + 0, most + 0}
    end
  end,

  text = function(of)
    if of.same then return of.same.text end
    local parts = {}
    for unit, u in pairs(of.units or {}) do parts[#parts + 1] = format('%s=%d/%d/%d', unit, unpack(u)) end
    return parts[1] and concat(parts, ',') or '-'
  end,

  -- count adds a ticket's costs (1), or takes them off (-1).
  count = function(of, costs, sign)
    local n = of.n + sign
    of.n, of.changed = n, true
    if n <= 0 then
      of.n, of.same, of.units, of.moved = 0, false, false, true
    elseif n == 1 and sign == 1 then
      of.same = costs
    elseif of.same ~= costs then
      of.units = of.units or {}
      for unit, cost in pairs(of.same and of.same.units or {}) do
        of.units[unit] = {cost * (n - sign), cost, cost}
      end
      of.same = false
      for unit, cost in pairs(costs.units) do
        local u = of.units[unit] or {0, cost, cost}
        of.units[unit] = u
        u[1] = max(0, min(u[1] + sign * cost, MOST))
        u[2], u[3] = min(u[2], cost), max(u[3], cost)
      end
    end
  end,

  -- of_unit returns the sum, and the least and the most of a ticket.
  of_unit = function(of, unit)
    local cost, u = of.same and of.same.units[unit], of.units and of.units[unit]
    if cost then return cost * of.n, cost, cost end
    if u then return unpack(u) end
    return 0, MOST, 0
  end,
}
