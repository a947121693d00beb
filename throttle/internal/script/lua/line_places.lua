-- line_places.lua: at which node a flow waits, and when the node is looked at.
--
-- A flow waits at the narrowest scope that has no room for its first ticket, or at ROOT if all
-- have. A node is due when its first flow may fit.
--
-- add_places(L) adds to a line:
--   scopes_of(flow) -> list, time         the flow's scopes whose windows the policy still has,
--                                         narrow to broad, and the time at which they stand
--   nodes_of(flow) -> list                the nodes that count its tickets, ROOT last
--   blocker(flow, costs) -> scope, time, never
--                                         the first scope without room for the costs, and when it
--                                         may have room; never: they exceed what a window can hold
--   due_at(queue, suffix) -> time         when a node is due, or nil
--   set_due(queue, suffix, time)          sets that; false: nobody waits there
--   due(queue, suffix, time)              has a node due at this time at the latest
--   reopen(flow, at)                      has the shared nodes due that the flow may have passed
--   place(flow, rank, costs)              has a flow wait where its first ticket has to
--   first_ticket(flow) -> ticket          {id, costs, rank, key}, or nil
--   forget(flow, id, costs)               takes a ticket off everything that counts it

local function add_places(L)
  local SLOTS = 100000       -- us between looks for slots on behalf of claims
  local LOOK_AGAIN = 1000000 -- us until the next look at a flow that leaves room for others
  local HEADS = 16           -- how many tickets of a flow are read at once

  local call = L.call
  local P, now = call.P, call.now
  local dues, dues_changed = L.dues, L.dues_changed

  function L.scopes_of(flow)
    local list, own, aligned = flow.scopes, flow.own, true
    if list then
      for i = 1, #list do
        local scope = list[i]
        if scope.own ~= own and scope.of.of_tenant then
          scopes.open(call, scope.suffix, scope.of.number, own)
        end
        if scope.now ~= now then aligned = false end
      end
      if aligned then return list, now end
      return list, windows.align(call, list)
    end
    list = {}
    for i = 1, #flow.suffixes do
      local suffix = flow.suffixes[i]
      local number = L.numbers[match(suffix, '^w:([^:]*)')]
      if number and suffix ~= windows.ROOT then
        list[#list + 1] = scopes.open(call, suffix, number, flow.own)
      elseif not number then
        flow.foreign = true -- it joined by scopes that the policy has not
      end
    end
    if L.numbers[''] then list[#list + 1] = scopes.open(call, windows.ROOT, L.numbers[''], nil) end
    flow.scopes = list
    return list, windows.align(call, list)
  end

  -- Where only tenants count, the flow's own record counts what waits at the tenant's scope.
  function L.nodes_of(flow)
    local list = flow.nodes
    if list then return list end
    list = {}
    if not call.only_tenants then
      for i = 1, #flow.suffixes do
        local suffix = flow.suffixes[i]
        if suffix ~= windows.ROOT then list[#list + 1] = L.node_of(flow.queue, suffix) end
      end
    end
    list[#list + 1] = L.node_of(flow.queue, windows.ROOT)
    flow.nodes = list
    return list
  end

  -- slots_open_at tells when to look for a free slot. Claims look more often: somebody waits.
  local function slots_open_at(flow, algorithm, st, at)
    local opens = algorithm.opens_at(st, at)
    return L.queues[flow.queue].claims and min(opens, at + SLOTS) or opens
  end

  -- leaving_room tells when a window opens in which room is left for others: when the cost fits
  -- without them and their turn has lapsed, at the latest.
  local function leaving_room(flow, scope, i, at, cost, before, opens, lapses)
    local window, st, alone = call.windows[i], scope.states[i], at
    if cost > 0 then
      alone = window.algorithm.fits_at(st, at, at, cost, before, 1)
      if alone > at and window.algorithm.opens_at then
        alone = slots_open_at(flow, window.algorithm, st, at)
      end
    end
    if scope.upstream then
      alone = once(extras, call).upstream().fits_at(scope, window, st, at, alone, cost, before)
    end
    return min(opens, max(alone, lapses), at + LOOK_AGAIN)
  end

  -- A flow whose tenant operators have paused waits at a node of the tenant, which is no scope of some
  -- policies. If L.order is set, room is left for sides whose turn it is (line_order.lua).
  function L.blocker(flow, costs)
    local list, at = L.scopes_of(flow)
    local blocked, blocked_until, by_window, order = nil, at, costs.windows, L.order
    local said = flow.own and flow.own['!']
    if said and said[2] == 1 then return nil, at, false end
    if said and said[1] > at then
      local own = list[1] and list[1].of.of_tenant and list[1]
      return own or {suffix = 'w:tenant:' .. flow.tenant}, said[1], false
    end
    for s = 1, #list do
      local scope = list[s]
      if scope.failed then return scope, now + 1000000, false end
      local of, states, ahead = scope.of.windows, scope.states, scope.ahead
      local room = order and order.at(flow, scope)
      for j = 1, #of do
        local i = of[j]
        local window, st, cost, opens = call.windows[i], states[i], by_window[i], at
        local before, reserved = 0, 0
        if ahead then before = ahead[window.unit] or 0 end
        if room then reserved = room.reserved[window.unit] or 0 end
        if cost > 0 then
          local algorithm = window.algorithm
          opens = algorithm.fits_at(st, at, at, cost, before + reserved, 1)
          if opens > at then
            if cost > st.limit then return nil, at, true end
            if algorithm.opens_at then opens = slots_open_at(flow, algorithm, st, at) end
          end
        end
        if scope.upstream then
          opens = once(extras, call).upstream().fits_at(scope, window, st, at, opens, cost, before + reserved)
        end
        if opens > at then
          if reserved > 0 then
            opens = leaving_room(flow, scope, i, at, cost, before, opens, room.lapses)
          end
          if opens > at and (not blocked or blocked == scope) then
            blocked = scope
            if opens > blocked_until then blocked_until = opens end
          end
        end
      end
      if room and room.held and (not blocked or blocked == scope) then
        blocked, blocked_until = scope, max(blocked_until, room.held)
      end
    end
    if order and not blocked and not L.numbers[''] then
      local room = order.at(flow, order.root)
      if room and room.held then return order.root, max(at, room.held), false end
    end
    return blocked, blocked_until, false
  end

  -- dues_of returns what is known of when a queue's nodes are due, by suffix.
  local function dues_of(queue)
    local known = dues[queue]
    if not known then
      known = {}
      dues[queue] = known
    end
    return known
  end

  function L.due_at(queue, suffix)
    local known = dues_of(queue)
    local time = known[suffix]
    if time == nil then
      time = L.before > 0 and redis.call('ZSCORE', P .. 'd:' .. queue, suffix)
      time = time and time + 0
      known[suffix] = time
    end
    return time
  end

  function L.set_due(queue, suffix, time)
    local known = dues_of(queue)
    if known[suffix] == time then return end
    known[suffix] = time
    dues_changed[queue] = dues_changed[queue] or {}
    dues_changed[queue][suffix] = true
  end

  function L.due(queue, suffix, time)
    local known = L.due_at(queue, suffix)
    if not known or known > time then L.set_due(queue, suffix, time) end
  end

  -- The node `at`, where the flow waits now, is left out. At the others the flow does not take what
  -- was kept for it.
  function L.reopen(flow, at)
    if call.only_tenants then return end
    local list = L.scopes_of(flow)
    for s = 1, #list do
      local suffix = list[s].suffix
      if suffix ~= at and suffix ~= windows.ROOT and not list[s].of.of_tenant and
        L.due_at(flow.queue, suffix) then
        L.due(flow.queue, suffix, now)
      end
    end
  end

  function L.place(flow, rank, costs)
    local blocked, time = L.blocker(flow, costs)
    flow.suffix, flow.rank, flow.changed = blocked and blocked.suffix or windows.ROOT, rank, true
    flow.score = L.score(L.node_of(flow.queue, flow.suffix), flow)
    L.due(flow.queue, flow.suffix, blocked and time or now)
  end

  -- Tickets that were taken stay in the sorted set until all is written.
  function L.first_ticket(flow)
    local first = flow.first
    while not first do
      local id = flow.heads and flow.heads[flow.head]
      if not id then
        if flow.read_to_end then return nil end
        L.flush_added()
        local from, to = format('%d', flow.popped), format('%d', flow.popped + HEADS - 1)
        flow.heads, flow.head = redis.call('ZRANGE', P .. 'f:' .. flow.id, from, to), 1
        id = flow.heads[1]
        if not id then
          flow.read_to_end = true
          return nil
        end
        L.read_all('t', flow.heads)
      end
      local of, costs, key, rank
      local record, between = L.read('t', id), flow.between
      if not between then
        between = (flow.batch and ' !' or ' ') .. flow.values .. ' '
        flow.between = between
      end
      if record and sub(record, 17, 16 + #between) == between then -- costs what most tickets do
        of, costs, key, rank = flow.id, 'requests=1', sub(record, 17 + #between), sub(record, 1, 16)
      else
        of, costs, key, rank = L.ticket(id)
      end
      if of == flow.id then
        first = {id = id, costs = windows.costs_of(call, costs), rank = rank, key = key}
        flow.first = first
      else -- it was evicted, or is a leftover of a line that expired
        flow.head, flow.popped = flow.head + 1, flow.popped + 1
      end
    end
    return first
  end

  function L.forget(flow, id, costs)
    flow.first = nil
    if next(L.waiting) then L.waiting = {} end -- line_eta.lua
    L.write('t', id, false)
    L.count = L.count - 1
    local q = L.queue_of(flow.queue)
    q.n, q.changed = max(0, q.n - 1), true
    line_units.count(flow, costs, -1)
    local list = L.nodes_of(flow)
    for i = 1, #list do line_units.count(list[i], costs, -1) end
    if flow.n == 0 then
      q.weights, q.flows = max(0, q.weights - flow.weight), q.flows - 1
      flow.suffix, flow.gone = nil, true
      local root = list[#list]
      if call.only_tenants and flow.tag > root.v then L.set_tag(root, flow, flow.tag) end
    end
  end
end
