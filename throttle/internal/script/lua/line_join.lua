-- line_join.lua: how tickets enter a line.
--
-- new_join(L) -> J, a table of verbs. A request r is that of request.lua, with its place read.
--   prefetch(tickets, flows, nodes)   reads the queues and these, in few commands
--   waits(id)                         whether the ticket is in line
--   ticket(id)                        that of line.lua
--   flow_for(r) -> flow               the flow of a request, as it is stored or as it would be
--   expected(...)                     that of line_eta.lua
--   with_slots(flow, position, expected, latest, binds) -> expected, latest, binds
--                                     the same, or when a handler slot is expected, if that is later
--   join(r, list, at) -> status, expected, latest, binds, nudge
--                                     puts its ticket in line: decide.lua's status, the expected
--                                     start, its upper bound and what binds, and 1 if a server
--                                     should wake
--   seldom()                          the verbs of line_leave.lua
--   finish()                          ends a call: it sweeps, and writes the line

local function new_join(L)
  local SLOTS = -1 -- of what binds

  local call = L.call
  local now = call.now
  local expected = new_eta(L)
  local J
  local function seldom() return once(new_leave, L, J) end

  local function flow_for(r)
    local flow = L.flow_of(r.flow)
    return flow and flow.n > 0 and flow or seldom().new_flow(r)
  end

  local function prefetch(tickets, flows, nodes)
    L.read_all('t', tickets)
    L.read_all('f', flows)
    L.read_all('u', nodes)
    L.read_queues()
  end

  local function waits(id) return L.read('t', id) and true or false end

  -- new_rank returns the rank at the end of the line, or in front of it. Ranks grow with time, so
  -- that a ticket that is put back in a line that was empty goes before those that came since.
  local function new_rank(front)
    local zero = 4503599627370496 -- ranks in front of all are below
    L.rank = max(L.rank + 1, now)
    return front and zero - L.rank or zero + L.rank
  end

  -- enter writes a ticket at its rank, and puts its flow where it has to wait.
  local function enter(r, q, flow, costs, wasted)
    local id, is_first = r.ticket, flow.n == 0
    local rank = format('%d', (r.rank or new_rank(r.front)) + 0)
    if q.claims then q.asked = now end
    L.count = L.count + 1
    if is_first then
      L.flows[r.flow] = flow
      q.weights, q.flows = q.weights + flow.weight, q.flows + 1
      if call.only_tenants then flow.tag = once(new_fair, L).tag_of(q, flow) end
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
    local nodes = L.nodes_of(flow)
    for i = 1, #nodes do line_units.count(nodes[i], costs, 1) end
    if is_first or r.front or r.rank then seldom().place_first(flow, id, rank, costs) end
  end

  local function with_slots(flow, position, low, high, binds)
    local q = L.queue_of(flow.queue)
    if q.since == 0 or q.claims then return low, high, binds end
    local slot = appointments.slot_at(q, now, flow, position)
    if slot > max(low, high) then return slot, 0, SLOTS end
    return low, high, binds
  end

  local function join(r, list, at)
    local costs = windows.costs_of(call, r.costs_text)
    local name = L.read('t', r.ticket) and L.flow_name(r.ticket)
    if name == r.flow then
      local low, high, binds = seldom().stands(r, list, at, nil)
      if low then return 6, low, high, binds end
    end
    list, at = windows.resumed(r, list, at)
    local flow, behind = flow_for(r), r.front and 0 or nil
    local low, high, binds, earliest, wasted = expected(flow, list, at, costs, behind)
    if r.backlog and flow.n >= r.backlog then return 5, low, high, binds, 0 end
    local refused = (r.max_wait or r.deadline) and windows.too_late(r, low, high, earliest)
    if refused then return refused, low, high, binds, 0 end
    if name then -- it leaves another flow: scopes or attributes have changed
      seldom().remove(r.ticket)
      flow = flow_for(r)
      low, high, binds, earliest, wasted = expected(flow, list, at, costs, behind)
    end
    local q = L.queue_of(r.queue)
    enter(r, q, flow, costs, wasted)
    local nudge = (r.rank or r.paused) and 0 or appointments.nudge(q, now, low)
    low, high, binds = with_slots(flow, behind or flow.n - 1, low, high, binds)
    return 3, low, high, binds, nudge
  end

  local function finish()
    if L.dead_claims then seldom().sweep() end
    L.finish()
  end

  J = {
    ticket = L.ticket, prefetch = prefetch, waits = waits, flow_for = flow_for, expected = expected,
    with_slots = with_slots, join = join, seldom = seldom, finish = finish,
  }
  return J
end
