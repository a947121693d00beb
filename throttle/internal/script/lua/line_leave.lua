-- line_leave.lua: how tickets leave a line untaken, and what else few calls ask of it.
--
-- new_leave(L, J) returns a table of verbs; J is that of line_join.lua:
--   new_flow(r) -> flow              the flow of a request that has none in line
--   place_first(flow, id, rank, costs)
--                                    puts a flow where it has to wait, if its new ticket `id` is its
--                                    first one
--   somebody_waits(r, id)            whether tickets other than `id` wait at the request's scopes
--   granted(r, list)                 counts the grant of a request that did not wait, for batches
--   expect(r, list, at, fits) -> expected, latest, binds
--                                    when a request without a place would start
--   stands(r, list, at, fits) -> expected, latest, binds
--                                    when its ticket is expected to start, or without one the last
--                                    of its flow; nil if it does not wait
--   remove(id)                       takes a ticket out of the line; whether it was there
--   take_back(r)                     undoes what a taken ticket moved of its tenant's tags
--   refresh(r)                       writes a flow's weight and own parameters as they are now
--   waits_at(suffix)                 whether a flow waits at this scope
--   look_again(suffixes)             makes the nodes of these scopes due: something was given back
--   sweep()                          removes claims whose process is gone

local function new_leave(L, J)
  local SWEPT = 64 -- claims that one call removes

  local call, fair, places, leave = L.call, once(new_fair, L), once(new_places, L), {}
  local P, now = call.P, call.now
  local function order() return once(new_order, L, {}, false) end

  function leave.new_flow(r)
    local before = L.flows[r.flow]
    local flow = L.new_flow(r.flow, r.weight + 0, r.tenant, concat(r.suffixes, '+'), r.own or '')
    if before then -- it was left in this call, and its place is not written yet
      flow.stored_suffix, flow.stored_rank = before.stored_suffix, before.stored_rank
    end
    return flow
  end

  -- A take by other limits looks at the flow again.
  function leave.place_first(flow, id, rank, costs)
    if flow.n > 1 then
      flow.heads, flow.first = nil, nil
      local first = places.first_ticket(flow)
      if not first or first.id ~= id then return end
    end
    places.place(flow, {rank = rank, costs = costs})
    local known, limits = redis.call('GET', P .. 'l'), windows.limits()
    if not known then
      redis.call('SET', P .. 'l', '0 ' .. limits, 'EX', L.ttl)
    elseif match(known, ' (.*)$') ~= limits then
      places.due(flow.queue, flow.suffix, now)
    end
  end

  -- is_only returns whether the ticket `id` is the only one of a flow that waits at this node.
  local function is_only(id, queue, suffix)
    local name = L.flow_name(id)
    local flow = name and L.flow_of(name)
    return flow and flow.n == 1 and flow.queue == queue and flow.suffix == suffix
  end

  -- owed_room returns whether the request owes room to a batch at one of its scopes.
  local function owed_room(r)
    for i = 1, #r.suffixes do
      if order().at(J.flow_for(r), call.open[r.suffixes[i]]) then return true end
    end
    return false
  end

  function leave.granted(r, list)
    order().charge(J.flow_for(r), list, windows.costs_of(call, r.costs_text))
    order().write()
  end

  -- Tickets that wait for slots only, where no window is shared, hold up no request that has a
  -- slot. But the first of the request's own flow may cost more, and have no room any more. Those of
  -- a batch hold up no live request, unless it owes them.
  function leave.somebody_waits(r, id)
    local batch = r.batch
    if call.batches and not batch and owed_room(r) then return true end
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
    local flow = not call.numbers[''] and L.flow_of(r.flow)
    if flow and flow.suffix == windows.ROOT and flow.same ~= windows.costs_of(call, r.costs_text) then
      local first = places.first_ticket(flow)
      return first and first.id ~= id and places.blocker(flow, first.costs) and true or false
    end
    return false
  end

  function leave.expect(r, list, at, fits)
    local flow, costs = J.flow_for(r), windows.costs_of(call, r.costs_text)
    list, at = windows.resumed(r, list, at)
    return J.expected(flow, list, at, costs, nil, true, fits)
  end

  function leave.stands(r, list, at, fits)
    local flow = L.flow_of(r.flow)
    if not flow or flow.n == 0 then return nil end
    L.flush_added()
    local key = P .. 'f:' .. flow.id
    local id = r.ticket or redis.call('ZRANGE', key, '-1', '-1')[1]
    local behind = id and redis.call('ZRANK', key, id)
    if not behind then return nil end
    local _, text = L.ticket(id)
    if L.flow_name(id) ~= flow.id then return nil end
    list, at = windows.resumed(r, list, at)
    local low, high, binds =
      J.expected(flow, list, at, windows.costs_of(call, text), behind, false, fits)
    return J.with_slots(flow, behind, low, high, binds)
  end

  function leave.remove(id)
    local name = L.flow_name(id)
    if not name then return false end
    local flow, _, text = L.flow_of(name), L.ticket(id)
    L.flush_added()
    if not flow then
      L.write('t', id, false)
      L.count = L.count - 1
      return true
    end
    local first = redis.call('ZRANGE', P .. 'f:' .. name, '0', '0')[1]
    if first == id and flow.suffix then -- it may have held up others
      places.look_again(flow.suffix)
      places.reopen(flow, nil)
    end
    redis.call('ZREM', P .. 'f:' .. name, id)
    places.forget(flow, id, windows.costs_of(call, text))
    if first == id and flow.n > 0 then
      flow.heads, flow.first = nil, nil
      local second = places.first_ticket(flow)
      if second then places.place(flow, second) end
    end
    return true
  end

  function leave.refresh(r)
    local flow = L.flow_of(r.flow)
    if not flow or flow.n == 0 then return end
    local q = L.queue_of(flow.queue)
    q.weights, q.changed = max(0, q.weights + r.weight - flow.weight), true
    flow.weight, flow.own_text, flow.changed = r.weight + 0, r.own or '', true
    flow.own = windows.own_parameters(call, flow.own_text)
    if flow.suffix then places.due(flow.queue, flow.suffix, now) end
  end

  function leave.waits_at(suffix)
    for name, q in pairs(L.queues) do
      if q.n > 0 and places.due_at(name, suffix) then return true end
    end
    return false
  end

  function leave.look_again(suffixes)
    for i = 1, #suffixes do places.look_again(suffixes[i]) end
  end

  function leave.sweep()
    local left, last = SWEPT, format('%d', SWEPT)
    for name, q in pairs(L.queues) do
      if q.claims and q.n > 0 and not L.alive(q) then
        for _, suffix in ipairs(redis.call('ZRANGE', P .. 'd:' .. name, '0', last)) do
          local node = P .. 'n:' .. name .. '|' .. suffix
          for _, member in ipairs(redis.call('ZRANGE', node, '0', last)) do
            for _, id in ipairs(redis.call('ZRANGE', P .. 'f:' .. sub(member, 18), '0', last)) do
              if left > 0 and leave.remove(id) then left = left - 1 end
            end
          end
        end
      end
    end
  end

  function leave.take_back(r)
    local flow = L.flow_of(r.flow)
    if not flow or flow.n == 0 then flow = leave.new_flow(r) end
    fair.charge(flow, windows.costs_of(call, r.costs_text), -1)
    if flow.n > 0 and flow.suffix then
      flow.score = fair.score(L.node_of(flow.queue, flow.suffix), flow)
    end
  end

  return leave
end
