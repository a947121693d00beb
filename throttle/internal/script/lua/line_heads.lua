-- line_heads.lua: at which node the first ticket of a flow waits, when that node is due, and how tickets leave.
--
-- A flow waits at the narrowest scope without room for its first ticket, or at ROOT. A node is due when a flow may fit.

local function new_heads(L)
  local CLAIMS_LOOK = 100000 -- us between looks, for claims, at a full window that holds its units by leases
  local HEADS = 16     -- how many tickets of a flow are read at once
  local SWEPT = 64     -- the most claims of one process that one call removes

  local call, fair, heads = L.call, made_once(new_fair, L), {}
  local P, now = call.P, call.now

  -- scopes_of returns the flow's scopes whose windows the policy still has, narrow to broad, and the
  -- time at which they stand. The list is made again once some scope's states were loaded again.
  function heads.scopes_of(flow)
    local list = flow.scopes
    if flow.generation == call.generation then return list, list[1] and list[1].now or now end
    list = {nil, nil}
    for _, suffix in ipairs(flow.suffixes) do
      local number = call.numbers[suffix == ROOT and '' or match(suffix, '^w:([^:]*)')]
      if number and suffix ~= ROOT then
        list[#list + 1] = scopes.open(call, suffix, number, flow.settings)
      elseif not number then
        flow.foreign = true -- it joined by scopes that the policy has not
      end
    end
    if call.numbers[''] then list[#list + 1] = scopes.open(call, ROOT, call.numbers[''], nil) end
    local at = windows.align(call, list)
    flow.scopes, flow.generation = list, call.generation
    return list, at
  end

  -- opens_at returns when a window may have room for a flow's costs after `ahead` units: then a take looks at
  -- the flow again. For claims, takes look at full windows with leases more often.
  local function opens_at(flow, scope, i, at, cost, ahead)
    local st, algorithm = scope.states[i], call.windows[i].algorithm
    local time = cost > 0 and algorithm.fits_at(st, at, cost, ahead, 1) or at
    if time > at and algorithm.opens_at then
      time = min(algorithm.opens_at(st, at), L.queues[flow.queue].claims and at + CLAIMS_LOOK or MOST)
    end
    if not scope.sections then return time end
    return upstream().fits_at(scope, i, at, time, cost, ahead)
  end

  -- scope_opens returns when a scope may have room for the costs, by window, of a flow's ticket. If L.order is set, the
  -- flow leaves room for sides whose turn it is, or waits for them (order.owed): LATEST at most, as they may be gone.
  local function scope_opens(flow, scope, at, costs)
    local ahead, owed = scope.ahead, L.order and L.order.owed(flow, scope)
    local time = max(at, owed and owed.opens or at)
    for _, i in ipairs(scope.spec.windows) do
      local passed, reserved = 0, 0
      if ahead then passed = ahead[call.windows[i].unit] or 0 end
      if owed then reserved = owed.reserved[call.windows[i].unit] or 0 end
      local opens = opens_at(flow, scope, i, at, costs[i], passed + reserved)
      if opens > at and reserved > 0 then
        local alone = opens_at(flow, scope, i, at, costs[i], passed)
        opens = min(opens, max(alone, owed.lapses), at + appointments.LATEST)
      end
      time = max(time, opens)
    end
    return time
  end

  -- blocker returns the suffix of the first scope without room for the costs, nil if all have room or the costs never
  -- fit; when the scope may have room; and whether the costs never fit, as they are above a window's capacity. A flow
  -- whose tenant operators have paused waits at a node of the tenant, even if the policy has no such scope.
  function heads.blocker(flow, costs)
    local list, at = heads.scopes_of(flow)
    local by_window, settings = costs.windows, flow.settings
    if settings and (settings.paused or 0) > at then
      local narrowest = list[1] and list[1].spec.of_tenant and list[1].suffix
      return narrowest or 'w:tenant:' .. flow.tenant, settings.paused, false
    end
    if settings and settings.unlimited then return nil, at, false end
    for s = 1, #list do -- a ticket that never fits does not wait, even for a narrower scope
      for _, i in ipairs(list[s].failed and {} or list[s].spec.windows) do
        if by_window[i] > list[s].states[i].limit then return nil, at, true end
      end
    end
    local last = #list + (L.order and not call.numbers[''] and 1 or 0) -- sides take turns at ROOT in any case
    for s = 1, last do
      local scope = list[s] or L.order.root
      if scope.failed then return scope.suffix, now + appointments.LATEST, false end
      local opens = scope_opens(flow, scope, at, by_window)
      if opens > at then return scope.suffix, opens, false end
    end
    return nil, at, false
  end

  -- due_at returns when a node is due; false if nobody waits there.
  function heads.due_at(queue, suffix)
    local q = L.queue_of(queue)
    if q.dues[suffix] == nil then
      local time = L.stored > 0 and redis.call('ZSCORE', P .. q.dues_key, suffix)
      q.dues[suffix] = time and time + 0
    end
    return q.dues[suffix]
  end

  function heads.set_due(queue, suffix, time)
    local q = L.queue_of(queue)
    if q.dues[suffix] ~= time then
      q.dues[suffix] = time
      L.change(q.dues_key, suffix, time)
    end
  end

  -- due_by makes a node due at this time at the latest.
  function heads.due_by(queue, suffix, time)
    local known = heads.due_at(queue, suffix)
    if not known or known > time then heads.set_due(queue, suffix, time) end
  end

  -- look_again makes a scope's nodes due in all queues that wait there but `except`, as something was given back.
  function heads.look_again(suffix, except)
    for name, q in pairs(L.queues) do
      if name ~= except and q.n > 0 and heads.due_at(name, suffix) then heads.due_by(name, suffix, now) end
    end
  end

  -- reopen makes the nodes of a flow's shared scopes due, in all queues, as the flow does not take room there now. At
  -- `suffix`, the scope where the flow waits now, it leaves out the node of the flow's queue.
  function heads.reopen(flow, suffix)
    if call.only_tenants then return end
    for _, scope in ipairs(heads.scopes_of(flow)) do
      if scope.suffix ~= ROOT and not scope.spec.of_tenant then
        heads.look_again(scope.suffix, scope.suffix == suffix and flow.queue)
      end
    end
  end

  -- put puts a flow where its first ticket has to wait.
  function heads.put(flow, ticket)
    local blocked, time = heads.blocker(flow, ticket.costs)
    local suffix = blocked or ROOT
    L.move(flow, suffix, ticket.rank, fair.score(L.node_of(flow.queue, suffix), flow, ticket.rank))
    heads.due_by(flow.queue, suffix, blocked and time or now)
  end

  -- load reads the first tickets of flows, up to n of each. Taken tickets stay in the set until all is written.
  function heads.load(list, n)
    L.flush()
    local tickets = {}
    for k = 1, #list do
      local flow = list[k]
      if not flow.heads or not flow.heads[flow.head] then
        local from, to = format('%d', flow.popped), format('%d', flow.popped + min(n, HEADS) - 1)
        flow.heads, flow.head = redis.call('ZRANGE', P .. 'f:' .. flow.id, from, to), 1
        for i = 1, #flow.heads do tickets[#tickets + 1] = flow.heads[i] end
      end
    end
    L.read_all('t', tickets)
  end

  -- first_ticket returns a flow's first ticket, {id, costs, rank, record}, or nil.
  function heads.first_ticket(flow)
    while not flow.first do
      local id = flow.heads and flow.heads[flow.head]
      if not id then
        heads.load({flow}, HEADS)
        id = flow.heads[1]
        if not id then return nil end
      end
      local values, costs, rank, record = L.ticket(id)
      if values == (flow.batch and '!' .. flow.values or flow.values) then
        flow.first = {id = id, costs = windows.costs_of(call, costs), rank = rank, record = record}
      else -- it was evicted, or is a leftover of a line that expired
        flow.head, flow.popped = flow.head + 1, flow.popped + 1
      end
    end
    return flow.first
  end

  -- forget takes a ticket off everything that counts it.
  function heads.forget(flow, id, costs)
    flow.first = nil
    L.write('t', id, false)
    L.count(flow, costs, -1)
    if flow.n == 0 then
      local q = L.queue_of(flow.queue)
      q.weights, q.flows = max(0, q.weights - flow.weight), q.flows - 1
      L.move(flow, nil, flow.rank, flow.score)
      fair.keep_tag(q, flow)
    end
  end

  -- remove removes a ticket from the line, and returns whether the ticket waited.
  function heads.remove(id)
    local name = L.flow_name(id)
    if not name then return false end
    local flow, _, costs_text = L.flow_of(name), L.ticket(id)
    L.flush()
    if not flow then
      L.write('t', id, false)
      L.tickets = L.tickets - 1
      return true
    end
    local first = redis.call('ZRANGE', P .. 'f:' .. name, '0', '0')[1]
    if first == id and flow.suffix then -- others may have waited for it
      heads.look_again(flow.suffix)
      heads.reopen(flow, nil)
    end
    L.change('f:' .. name, id, false)
    heads.forget(flow, id, windows.costs_of(call, costs_text))
    if first == id and flow.n > 0 then
      flow.heads, flow.first = nil, nil
      local second = heads.first_ticket(flow)
      if second then heads.put(flow, second) end
    end
    return true
  end

  -- sweep removes claims of a process that has ended: SWEPT at most.
  function heads.sweep(q)
    local left, last = SWEPT, format('%d', SWEPT)
    for _, suffix in ipairs(redis.call('ZRANGE', P .. q.dues_key, '0', last)) do
      for _, kind in ipairs(call.only_tenants and {'n:'} or {'m:', 'n:'}) do
        for _, member in ipairs(redis.call('ZRANGE', P .. kind .. q.queue .. '|' .. suffix, '0', last)) do
          for _, id in ipairs(redis.call('ZRANGE', P .. 'f:' .. match(member, '%S+$'), '0', last)) do
            if left > 0 and heads.remove(id) then left = left - 1 end
          end
        end
      end
    end
  end

  return heads
end
