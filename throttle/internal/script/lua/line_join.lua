-- line_join.lua: how tickets enter a line, and leave it untaken.
--
-- new_join(L) -> J, with these verbs. A request r is that of request.lua, with its place read.
--   read_line()                       reads the queues, which all other verbs need
--   prefetch(tickets, flows, nodes)   reads these too, in few commands
--   waits(id)                         whether the ticket is in line
--   rank(id)                          its rank, nil if it is not in line
--   somebody_waits(r, id)             whether tickets other than `id` wait at the request's scopes
--   expect(r, list, at, fits) -> least, most
--                                     when a request without a place would start
--   join(r, list, at) -> status, expected, most, nudge, least
--                                     puts its ticket in line: decide.lua's status, the expected
--                                     start with its upper and its lower bound, 1 if a server
--                                     should wake
--   remove(id)                        takes a ticket out of the line; whether it was there
--   take_back(r)                      undoes what a taken ticket moved of its tenant's tags
--   refresh(r)                        writes a flow's weight and own parameters as they are now
--   look_again(suffixes)              has the flows that wait at these scopes looked at: something
--                                     was given back there
--   sweep()                           removes claims whose process is gone
--   finish()                          ends a call: it sweeps, and writes the line

local new_join
do
local format, gsub, sub, max = string.format, string.gsub, string.sub, math.max

local SWEPT = 64 -- claims that one call removes

function new_join(L)
  local call = L.call
  local P, now = call.P, call.now
  local E = new_eta(L)
  local expected, least_start = E.expected, E.least_start
  local J = { -- all fields are named here, as a table that grows is copied
    read_line = L.read_line, prefetch = false, waits = false, rank = false, somebody_waits = false, expect = false,
    join = false, remove = false, take_back = false, refresh = false, look_again = false,
    sweep = false, finish = false,
  }

  -- A line keeps a tenant's own parameters by the names of windows. Their places may change.
  local function own_text(own)
    if own == '' or sub(own, 1, 1) == '@' then return own end
    return (gsub(own, '(%d+)( %S+ %S+ %S+;)', function(i, rest)
      return '@' .. call.windows[i + 0].name .. rest
    end))
  end

  -- note_limits notes by which limits a flow got its place: a take by others looks at it again.
  local function note_limits()
    local known, limits = L.read('u', 'limits'), windows.limits()
    if not known then
      L.write('u', 'limits', limits)
    elseif known ~= limits then
      L.write('u', 'limits', '-')
    end
  end

  -- flow_for returns the flow of a request, as it is stored or as it would be.
  local function flow_for(r)
    local flow = L.flow_of(r.flow)
    if flow and flow.n > 0 then return flow end
    return L.new_flow(r.flow, r.weight + 0, r.tenant, r.suffixes, own_text(r.own))
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

  function J.rank(id)
    local _, _, _, rank = L.ticket(id)
    return rank
  end

  -- is_only tells whether the ticket `id` is the only one of a flow that waits at this node.
  local function is_only(id, queue, suffix)
    local own = L.ticket(id)
    local flow = own and L.flow_of(own)
    return flow and flow.n == 1 and flow.queue == queue and flow.suffix == suffix
  end

  -- Tickets that wait for slots only, where no window is shared, hold up no request that has a
  -- slot. But the first of the request's own flow may cost more, and have no room any more.
  function J.somebody_waits(r, id)
    for name, q in pairs(L.queues) do
      if name == r.queue and q.n > 0 or name ~= r.queue and L.alive(q) then
        for i = 1, #r.suffixes do
          local flows = redis.call('ZCARD', P .. 'n:' .. name .. '|' .. r.suffixes[i])
          if flows > 0 and not (flows == 1 and id and is_only(id, name, r.suffixes[i])) then
            return true
          end
        end
      end
    end
    local own = not L.numbers[''] and L.flow_of(r.flow)
    if own and own.suffix == windows.ROOT and own.same ~= windows.costs_of(call, r.costs_text) then
      local first = L.first_ticket(own)
      return first and first.id ~= id and L.blocker(own, first.costs) and true or false
    end
    return false
  end

  function J.expect(r, list, at, fits)
    local flow, costs = flow_for(r), windows.costs_of(call, r.costs_text)
    local low, high = expected(flow, list, at, costs, nil, false, fits)
    if low <= at then low, high = expected(flow, list, at, costs, nil, true, fits) end
    return low, high
  end

  -- first_left has the nodes looked at that a flow's first ticket may have held up.
  local function first_left(flow)
    for name, q in pairs(L.queues) do
      if name == flow.queue or q.n > 0 and L.due_at(name, flow.suffix) then
        L.due(name, flow.suffix, now)
      end
    end
    L.reopen(flow, nil)
  end

  function J.remove(id)
    local of, text = L.ticket(id)
    if not of then return false end
    local flow = L.flow_of(of)
    L.flush_added()
    if not flow then
      L.write('t', id, false)
      L.count = L.count - 1
      return true
    end
    local first = redis.call('ZRANGE', P .. 'f:' .. of, '0', '0')[1]
    if first == id and flow.suffix then first_left(flow) end
    redis.call('ZREM', P .. 'f:' .. of, id)
    L.forget(flow, id, windows.costs_of(call, text))
    if first == id and flow.n > 0 then
      flow.heads, flow.read_to_end = nil, nil
      local second = L.first_ticket(flow)
      if second then L.place(flow, second.rank, second.costs) end
    end
    return true
  end

  -- new_rank returns the rank at the end of the line, or in front of it. Ranks grow with time, so
  -- that a ticket that is put back in a line that was empty goes before those that came since.
  local function new_rank(front)
    L.line_changed = true
    if front then
      L.front = max(L.front + 1, now)
      return format('%d', L.RANK_ZERO - L.front)
    end
    L.rank = max(L.rank + 1, now)
    return format('%d', L.RANK_ZERO + L.rank)
  end

  -- enter writes a ticket at its rank, and has its flow wait where it has to.
  local function enter(r, flow, list, costs, rank, start)
    local q, is_first = L.queue_of(r.queue), flow.n == 0
    if q.claims then q.asked = now end
    q.n, q.changed = q.n + 1, true
    L.count = L.count + 1
    if is_first then
      L.flows[r.flow] = flow
      q.weights = q.weights + flow.weight
      if call.only_tenants then
        flow.tag = max(L.tag_of(L.node_of(flow.queue, windows.ROOT), flow), 0)
      end
    end
    L.new_ticket(r.ticket, flow, costs, rank, r.key, start)
    local added = L.added[r.flow]
    if not added then
      added = {}
      L.added[r.flow] = added
    end
    added[#added + 1] = rank
    added[#added + 1] = r.ticket
    E.joined(r, list, costs)
    line_units.count(flow, costs, 1)
    local nodes = L.nodes_of(flow)
    for i = 1, #nodes do line_units.count(nodes[i], costs, 1) end
    if is_first then
      L.place(flow, rank, costs)
      note_limits()
    elseif r.front or r.rank then
      flow.heads, flow.read_to_end = nil, nil
      local first = L.first_ticket(flow)
      if first and first.id == r.ticket then
        L.place(flow, rank, costs)
        note_limits()
      end
    end
  end

  function J.join(r, list, at)
    local costs = windows.costs_of(call, r.costs_text)
    local of = L.ticket(r.ticket)
    if of then
      if of == r.flow then
        L.flush_added()
        local flow, behind = L.flow_of(of), redis.call('ZRANK', P .. 'f:' .. of, r.ticket)
        if flow and behind then
          local low, high = expected(flow, list, at, costs, behind)
          return 6, low, high, 0, low > at and least_start(flow, list, at, costs, behind, low) or low
        end
      end
      J.remove(r.ticket) -- from another flow: scopes or attributes have changed
    end
    local flow, behind = flow_for(r), r.front and 0 or nil
    local low, high = expected(flow, list, at, costs, behind)
    local least = low > at and least_start(flow, list, at, costs, behind, low) or low
    if r.options ~= '' then
      if r.backlog > 0 and flow.n >= r.backlog then return 5, low, high, 0 end
      if r.max_wait > 0 and high - at > r.max_wait then return 4, low, high, 0 end
      if r.deadline > 0 and least - at > r.deadline then return 7, low, high, 0, least end
    end
    enter(r, flow, list, costs, r.rank or new_rank(r.front), high)
    local nudge = r.rank and 0 or appointments.nudge(L.queue_of(r.queue), now, low)
    return 3, low, high, nudge, least
  end

  function J.refresh(r)
    local flow = L.flow_of(r.flow)
    if not flow or flow.n == 0 then return end
    local q = L.queue_of(flow.queue)
    q.weights, q.changed = max(0, q.weights + r.weight - flow.weight), true
    flow.weight, flow.own_text, flow.changed = r.weight + 0, own_text(r.own), true
    flow.own = windows.own_parameters(call, flow.own_text)
    if flow.suffix then L.due(flow.queue, flow.suffix, now) end
  end

  function J.look_again(suffixes)
    for name, q in pairs(L.queues) do
      if q.n > 0 then
        for i = 1, #suffixes do
          if L.due_at(name, suffixes[i]) then L.due(name, suffixes[i], now) end
        end
      end
    end
  end

  function J.sweep()
    local left, last = SWEPT, format('%d', SWEPT)
    for name, q in pairs(L.queues) do
      if q.claims and q.n > 0 and not L.alive(q) then
        for _, suffix in ipairs(redis.call('ZRANGE', P .. 'd:' .. name, '0', last)) do
          local node = P .. 'n:' .. name .. '|' .. suffix
          for _, member in ipairs(redis.call('ZRANGE', node, '0', last)) do
            for _, id in ipairs(redis.call('ZRANGE', P .. 'f:' .. sub(member, 18), '0', last)) do
              if left > 0 and J.remove(id) then left = left - 1 end
            end
          end
        end
      end
    end
  end

  function J.take_back(r)
    local flow = flow_for(r)
    L.charge(flow, windows.costs_of(call, r.costs_text), -1)
    if flow.n > 0 and flow.suffix then
      flow.score = L.score(L.node_of(flow.queue, flow.suffix), flow)
    end
  end

  function J.finish()
    if L.dead_claims then J.sweep() end
    L.finish()
  end

  return J
end
end
