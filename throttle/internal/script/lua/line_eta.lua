-- line_eta.lua: when a ticket is expected to start.
--
-- new_eta(L) -> E, a table of
--   expected(flow, list, at, costs, behind, all_first, fits) -> low, most, least, binds
--                    when a ticket of these costs fits behind all others of its flow, or behind
--                    `behind` of them: the expected start, its upper bound, and the earliest start
--                    whatever becomes of other flows, and the number of the window that holds it up
--                    for longest, 0 if none does; list: the flow's scopes, at: their time. With
--                    all_first, all tickets that wait at its scopes go first. `fits`, if given, gets
--                    by window when the costs fit there, 0 for at once
--
-- Where all that waits fits now, so does the ticket. All else is for line_bounds.lua, which is set
-- up when it is first needed.

local function new_eta(L)
  local call, bounds, roomy = L.call, nil, {}

  -- others_waiting tells how much waits at a scope in other queues that are alive: of batches, or if
  -- not `batch` of live tickets. L.waiting keeps it while tickets of one queue join.
  local function others_waiting(flow, scope, unit, own_only, batch)
    if L.waiting.queue ~= flow.queue then L.waiting = {queue = flow.queue} end
    local key = scope.suffix .. (batch and '! ' or ' ') .. unit
    local known = L.waiting[key]
    if known then return known end
    local sum, least, most, tickets = 0, MOST, 0, 0
    for name, q in pairs(L.queues) do
      if q.batch == batch and name ~= flow.queue and L.alive(q) then
        local of = own_only and L.brief_flow(name .. flow.values) or L.node_of(name, scope.suffix)
        if of.n > 0 then
          local s, l, m = line_units.of_unit(of, unit)
          sum, tickets, least, most = sum + s, tickets + of.n, min(least, l), max(most, m)
        end
      end
    end
    known = {sum, least, most, tickets}
    L.waiting[key] = known
    return known
  end

  -- waiting_units tells how much waits at a scope, in all queues that are alive: sum, least and most
  -- of a ticket, and how many tickets. Batches do not count for live tickets. `only`, if given, names
  -- the class of other queues that is asked for alone: true for batches.
  local function waiting_units(flow, scope, unit, only)
    local own_only, queues = call.only_tenants and scope.of.of_tenant, L.queues
    if only ~= nil then
      local others = others_waiting(flow, scope, unit, own_only, only)
      return others[1], others[2], others[3], others[4]
    end
    local of = own_only and flow or L.node_of(flow.queue, scope.suffix)
    local sum, least, most = line_units.of_unit(of, unit)
    local first = next(queues)
    if first == nil or first == flow.queue and next(queues, first) == nil then
      return sum, least, most, of.n
    end
    local batch, tickets = flow.batch, of.n
    for class = 0, batch and 1 or 0 do
      local others = others_waiting(flow, scope, unit, own_only, class == 1)
      sum, tickets = sum + others[1], tickets + others[4]
      least, most = min(least, others[2]), max(most, others[3])
    end
    return sum, least, most, tickets
  end

  -- room_for tells whether all that waits at a scope fits now, so many tickets more, and the ticket.
  local function room_for(flow, scope, at, costs, more)
    local of = scope.of.windows
    for j = 1, #of do
      local i = of[j]
      local window = call.windows[i]
      local _, _, most, tickets = waiting_units(flow, scope, window.unit)
      local each = max(most, costs.windows[i])
      local ahead = min(MOST, (tickets + more) * each)
      if each > 0 and
        window.algorithm.fits_at(scope.states[i], at, at, each, ahead, each) > at then
        return false
      end
    end
    return true
  end

  -- room_for_all tells whether all that waits fits now, and the ticket too. A call has no more
  -- tickets than 64. So the second one at a scope is asked about with as many more. If these fit,
  -- others that cost the same need not be looked at.
  local function room_for_all(flow, list, at, costs)
    if roomy.costs ~= costs then roomy = {costs = costs} end
    for s = 1, #list do
      local scope = list[s]
      if scope.upstream then return false end
      local seen = roomy[scope]
      if scope.changed then seen = nil end
      if seen ~= true then
        if seen == nil or not room_for(flow, scope, at, costs, 64) then
          if not room_for(flow, scope, at, costs, 0) then return false end
          roomy[scope] = false
        else
          roomy[scope] = true
        end
      end
    end
    return true
  end

  local function expected(flow, list, at, costs, behind, all_first, fits)
    local batch = flow.batch -- it may have to keep its pace
    if not batch and room_for_all(flow, list, at, costs) then
      for i = 1, fits and #call.windows or 0 do fits[i] = 0 end
      return at, at, at, 0
    end
    bounds = bounds or new_bounds(L, waiting_units)
    return bounds(flow, list, at, costs, behind, all_first, fits)
  end

  return {expected = expected}
end
