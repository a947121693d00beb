-- line_leave.lua: how tickets leave a line untaken, and what else few calls ask of it.
--
-- add_leaving(L, J, expected, with_slots) adds to the verbs of line_join.lua those that are set up
-- when they are first asked for. Besides those that it lists:
--   place_first(flow, rank, costs)   has a flow wait where its new first ticket has to
--   new_flow(r) -> flow              the flow of a request that has none in line
--   granted(r, list)                 counts the grant of a request that did not wait, for batches

local function add_leaving(L, J, expected, with_slots)
  local gsub = string.gsub

  local SWEPT = 64 -- claims that one call removes

  local call = L.call
  local P, now = call.P, call.now
  local function order() return once(new_order, L, {}, false) end

  -- A line keeps a tenant's own parameters by the names of windows. Their places may change.
  local function own_text(own)
    if not own or sub(own, 1, 1) == '@' then return own or '' end
    return (gsub(own, '(%d+)(,%d+,%d+,%d+;)', function(i, rest)
      return '@' .. call.windows[i + 0].name .. rest
    end))
  end

  function J.new_flow(r)
    local list = concat(r.suffixes, '+')
    return L.new_flow(r.flow, r.weight + 0, r.tenant, r.suffixes, list, own_text(r.own))
  end

  -- A take by other limits looks at the flow again.
  function J.place_first(flow, rank, costs)
    L.place(flow, rank, costs)
    local known, limits = L.read('u', 'limits'), windows.limits()
    if not known then
      L.write('u', 'limits', limits)
    elseif known ~= limits then
      L.due(flow.queue, flow.suffix, now)
    end
  end

  -- is_only tells whether the ticket `id` is the only one of a flow that waits at this node.
  local function is_only(id, queue, suffix)
    local own = L.ticket(id)
    local flow = own and L.flow_of(own)
    return flow and flow.n == 1 and flow.queue == queue and flow.suffix == suffix
  end

  -- owed_there tells whether a batch is to go before the request at one of the scopes.
  local function owed_there(r)
    for i = 1, #r.suffixes do
      if order().at(J.flow_for(r), call.open[r.suffixes[i]]) then return true end
    end
    return false
  end

  function J.granted(r, list)
    order().charge(J.flow_for(r), list, windows.costs_of(call, r.costs_text))
    order().write()
  end

  -- Tickets that wait for slots only, where no window is shared, hold up no request that has a
  -- slot. But the first of the request's own flow may cost more, and have no room any more. Those of
  -- a batch hold up no live request, unless it owes them.
  function J.somebody_waits(r, id)
    local batch = r.batch
    if call.batches and not batch and owed_there(r) then return true end
    for name, q in pairs(L.queues) do
      if (batch or not q.batch) and (name == r.queue and q.n > 0 or name ~= r.queue and L.alive(q)) then
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
    local flow, costs = J.flow_for(r), windows.costs_of(call, r.costs_text)
    list, at = windows.resumed(r, list, at)
    return expected(flow, list, at, costs, nil, true, fits)
  end

  function J.stands(r, list, at, fits)
    local flow = L.flow_of(r.flow)
    if not flow or flow.n == 0 then return nil end
    local key = P .. 'f:' .. flow.id
    local id = r.ticket or redis.call('ZRANGE', key, '-1', '-1')[1]
    local behind = id and redis.call('ZRANK', key, id)
    if not behind then return nil end
    local of, text = L.ticket(id)
    if of ~= flow.id then return nil end
    list, at = windows.resumed(r, list, at)
    local low, high, binds = expected(flow, list, at, windows.costs_of(call, text), behind, false, fits)
    return with_slots(r, flow, behind, low, high, binds)
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
      flow.heads, flow.first, flow.read_to_end = nil, nil, nil
      local second = L.first_ticket(flow)
      if second then L.place(flow, second.rank, second.costs) end
    end
    return true
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

  function J.waits_at(suffix)
    for name, q in pairs(L.queues) do
      if q.n > 0 and L.due_at(name, suffix) then return true end
    end
    return false
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

  function J.untook(r)
    local flow = L.flow_of(r.flow)
    local q = flow and L.queues[flow.queue]
    if q and q.taken > 0 then q.taken, q.changed = q.taken - 1, true end
  end

  function J.take_back(r)
    local flow = L.flow_of(r.flow)
    if not flow or flow.n == 0 then flow = J.new_flow(r) end
    L.charge(flow, windows.costs_of(call, r.costs_text), -1)
    if flow.n > 0 and flow.suffix then
      flow.score = L.score(L.node_of(flow.queue, flow.suffix), flow)
    end
  end

end
