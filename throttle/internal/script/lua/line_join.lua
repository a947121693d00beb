-- line_join.lua: how tickets enter a line, and leave it untaken.
--
-- new_join(L) -> J, with these verbs. A request r is that of request.lua, with its place read.
--   read_line()                       reads the queues, which all other verbs need
--   prefetch(tickets, flows, nodes)   reads these too, in few commands
--   waits(id)                         whether the ticket is in line
--   ticket(id)                        that of line.lua
--   somebody_waits(r, id)             whether tickets other than `id` wait at the request's scopes
--   expect(r, list, at, fits) -> expected, latest, binds
--                                     when a request without a place would start
--   stands(r, list, at, fits) -> expected, latest, binds
--                                     when its ticket is expected to start, or without one the last
--                                     of its flow; nil if it does not wait. As join's
--   join(r, list, at) -> status, expected, latest, binds, nudge
--                                     puts its ticket in line: decide.lua's status, the expected
--                                     start, its upper bound and what binds, and 1 if a server
--                                     should wake
--   remove(id)                        takes a ticket out of the line; whether it was there
--   untook(r)                         counts a ticket that was put back no more as one that had a slot
--   take_back(r)                      undoes what a taken ticket moved of its tenant's tags
--   refresh(r)                        writes a flow's weight and own parameters as they are now
--   waits_at(suffix)                  whether a flow waits at this scope
--   look_again(suffixes)              has the flows that wait at these scopes looked at: something
--                                     was given back there
--   sweep()                           removes claims whose process is gone
--   finish()                          ends a call: it sweeps, and writes the line

local function new_join(L)
  local SLOTS = -1 -- of what binds

  local call = L.call
  local P, now, ROOT = call.P, call.now, windows.ROOT
  local expected = new_eta(L)
  local J = { -- all fields are named here, as a table that grows is copied
    read_line = L.read_line, ticket = L.ticket, flow_for = false, prefetch = false, waits = false,
    join = false, finish = false, untook = false,
  }

  -- flow_for returns the flow of a request, as it is stored or as it would be.
  function J.flow_for(r)
    local flow = L.brief_flow(r.flow)
    return flow and flow.n > 0 and flow or J.new_flow(r)
  end

  function J.prefetch(tickets, flows, nodes)
    nodes[#nodes + 1] = 'line'
    nodes[#nodes + 1] = 'limits'
    L.read_all('t', tickets)
    L.read_all('f', flows)
    L.read_all('u', nodes)
    L.read_line()
  end

  function J.waits(id) return L.read('t', id) and true or false end

  -- new_rank returns the rank at the end of the line, or in front of it. Ranks grow with time, so
  -- that a ticket that is put back in a line that was empty goes before those that came since.
  local function new_rank(front)
    local own, zero = L.own, 4503599627370496 -- ranks in front of all are below
    own.changed = true
    if front then
      own.front = max(own.front + 1, now)
      return zero - own.front
    end
    own.rank = max(own.rank + 1, now)
    return zero + own.rank
  end

  -- enter writes a ticket at its rank, and has its flow wait where it has to.
  local function enter(r, flow, costs, wasted)
    local id, queue, at_rank = r.ticket, r.queue, (r.rank or new_rank(r.front)) + 0
    local rank, q, is_first = format('%d', at_rank), L.queue_of(queue), flow.n == 0
    if q.claims then q.asked = now end
    q.n, q.changed = q.n + 1, true
    L.count = L.count + 1
    local root = L.node_of(queue, ROOT)
    if is_first then
      L.flows[r.flow] = flow
      q.weights, q.flows = q.weights + flow.weight, q.flows + 1
      if call.only_tenants then flow.tag = max(L.tag_of(root, flow), 0) end
    end
    local text = costs.text
    if text == 'requests=1' then text = '' end -- the costs of most tickets
    local values = q.batch and '!' .. flow.values or flow.values
    L.write('t', id, rank .. text .. ' ' .. values .. ' ' .. r.key)
    local added = L.added[r.flow]
    if added then
      local n = #added
      added[n + 1], added[n + 2] = rank, id
    else
      L.added[r.flow] = {rank, id}
    end
    line_units.count(flow, costs, 1)
    if wasted and flow.units then
      for unit, left in pairs(wasted) do
        if flow.units[unit] then flow.units[unit][4] = left end
      end
    end
    if call.only_tenants then
      line_units.count(root, costs, 1)
    else
      local nodes = L.nodes_of(L.flow_of(r.flow))
      for i = 1, #nodes do line_units.count(nodes[i], costs, 1) end
    end
    if is_first then
      J.place_first(flow, rank, costs)
    elseif r.front or r.rank then
      flow = L.flow_of(r.flow)
      flow.heads, flow.first, flow.read_to_end = nil, nil, nil
      local first = L.first_ticket(flow)
      if first and first.id == id then J.place_first(flow, rank, costs) end
    end
  end

  -- with_slots returns the expected start, its upper bound and what binds: handler slots, if these
  -- are expected after the bound of the windows.
  local function with_slots(r, flow, position, low, high, binds)
    local q = L.queue_of(r.queue)
    if q.since == 0 or q.claims then return low, high, binds end
    local slot = appointments.slot_at(q, now, flow, position)
    if slot > max(low, high) then return slot, 0, SLOTS end
    return low, high, binds
  end

  function J.join(r, list, at)
    local costs, of = windows.costs_of(call, r.costs_text), J.waits(r.ticket) and L.ticket(r.ticket)
    list, at = windows.resumed(r, list, at)
    if of == r.flow then
      L.flush_added()
      local flow, behind = L.brief_flow(of), redis.call('ZRANK', P .. 'f:' .. of, r.ticket)
      if flow and behind then
        local low, high, binds = expected(flow, list, at, costs, behind)
        return 6, with_slots(r, flow, behind, low, high, binds)
      end
    end
    local flow, behind = J.flow_for(r), r.front and 0 or nil
    local low, high, binds, earliest, wasted = expected(flow, list, at, costs, behind)
    if r.backlog and flow.n >= r.backlog then return 5, low, high, binds, 0 end
    local refused = (r.max_wait or r.deadline) and windows.too_late(r, low, high, earliest)
    if refused then return refused, low, high, binds, 0 end
    if of then -- it leaves another flow: scopes or attributes have changed
      J.remove(r.ticket)
      flow = J.flow_for(r)
      low, high, binds, earliest, wasted = expected(flow, list, at, costs, behind)
    end
    enter(r, flow, costs, wasted)
    local nudge = (r.rank or r.paused) and 0 or appointments.nudge(L.queue_of(r.queue), now, low)
    low, high, binds = with_slots(r, flow, behind or flow.n - 1, low, high, binds)
    return 3, low, high, binds, nudge
  end

  function J.finish()
    if L.own and L.own.dead_claims then J.sweep() end
    L.finish()
  end

  return setmetatable(J, {__index = function(_, name)
    setmetatable(J, nil)
    add_leaving(L, J, expected, with_slots)
    return J[name]
  end})
end
