-- line_take.lua: takes tickets from a line.
--
-- new_take(L) returns a table of restore and take, below. `taken` is the reply of take.lua: a list, which also has
-- two fields: n, the number of tickets; and kept, the parts of the take's record, k:PROCESS.

local function new_take(L)
  local STEPS = 128       -- flows that one call visits without a grant: for each side, then at ROOT for all together
  local DUE = '128'       -- due nodes of a side that one call visits
  local LOOKS = '32'      -- about how many nodes of a queue one call makes due after limits have changed
  local CHANGES = 1000000 -- us between looks after changes of limits

  local call, fair, heads = L.call, made_once(new_fair, L), made_once(new_heads, L)
  local P, now = call.P, call.now

  -- load_list reads the first n flows of n:NODE into node.list, with their scopes and first tickets. `whole`: these are
  -- all; `refill`: once it is empty, more may have come; node.crowded: a tenant has further flows in m:NODE (line.lua).
  local function load_list(node, n)
    local key, may_crowd = P .. 'n:' .. node.key, node.shared and not call.only_tenants
    local found = redis.call('ZRANGE', key, '0', format('%d', n - 1), 'WITHSCORES')
    local ids, list, suffixes = {}, {}, {}
    for i = 1, #found, 2 do ids[#ids + 1] = sub(found[i], 18) end
    L.read_all('f', ids)
    for k = 1, #ids do
      local flow, member, score = L.flow_of(ids[k]), found[2 * k - 1], found[2 * k] + 0
      if not flow or flow.suffix ~= node.suffix or flow.stored_rank ~= sub(member, 1, 16) then
        redis.call('ZREM', key, member)
      else
        flow.score = flow.score or score
        list[#list + 1] = flow
        for i = 1, #flow.suffixes do suffixes[#suffixes + 1] = flow.suffixes[i] end
      end
    end
    node.list, list.whole = list, #ids < n
    list.refill = not list.whole or may_crowd and #ids > 0
    node.crowded = may_crowd and redis.call('ZCARD', P .. 'm:' .. node.key) ~= redis.call('ZCARD', key)
    scopes.read(call, suffixes)
    heads.load(list, ceil((n - 1) / max(1, #list)) + 1) -- n - 1 tickets of all together, and one more of each
  end

  -- move_first lets the first flow of a node wait by another rank and score, at another node, or nowhere. The list of
  -- a crowded node is read again, as another flow of the tenant may go first now.
  local function move_first(node, flow, suffix, rank, score)
    local list = node.list
    table.remove(list, 1)
    L.move(flow, suffix, rank, score)
    if node.crowded then
      node.list = nil
    elseif suffix == node.suffix then
      local i = #list
      while i > 0 and (list[i].score > score or list[i].score == score and list[i].rank > rank) do i = i - 1 end
      -- If it is the last of the list, flows that were not read may go first.
      if i < #list or list.whole then table.insert(list, i + 1, flow) end
    end
  end

  -- head_of returns the first flow of a node and its first ticket, nil if nobody waits there. It reads n
  -- flows at a time. Flows without tickets are dropped.
  local function head_of(node, n)
    while true do
      if not node.list or not node.list[1] and node.list.refill then
        L.flush()
        load_list(node, node.crowded and 1 or n)
      end
      local flow = node.list[1]
      if flow then
        local elsewhere = flow.suffix ~= node.suffix and flow.suffix or nil
        local ticket = not elsewhere and heads.first_ticket(flow)
        if ticket then return flow, ticket end
        move_first(node, flow, elsewhere, flow.rank, flow.score)
      elseif not node.list.refill then
        return nil
      end
    end
  end

  -- add_to_reply adds a ticket to `taken`: its text, when it was granted, and how much each window has counted then.
  -- The take's record keeps the text, and what restore needs besides.
  local function add_to_reply(taken, flow, ticket, status, at)
    local list, all, scope_of, kept, n = flow.scopes, call.windows, call.scope_of, taken.kept, #taken
    local text = ticket.id .. ' ' .. ticket.record .. ' ' .. flow.tenant .. ' ' .. status
    if flow.foreign then text = text .. ':' .. flow.suffixes_text end
    kept[#kept + 1] = text
    kept[#kept + 1] = format(' %d %s;%s', flow.weight, flow.suffixes_text, flow.settings_text) ..
      (at == now and '\n' or format('\t%d\n', at))
    taken[n + 1], taken[n + 2], taken.n = text, at, taken.n + 1
    for i = 1, #all do taken[n + 2 + i] = status == 'granted' and list[scope_of[i]].states[i].used or 0 end
  end

  -- hand_out takes the first ticket of the first flow at ROOT, which no scope blocks, and charges it if its status is
  -- "granted". The next ticket of the flow then waits. at: the time at which the flow's scopes stand.
  local function hand_out(root, flow, ticket, taken, at, never)
    local list, settings = flow.scopes, flow.settings
    local uncharged = #list < #call.scopes or settings and settings.unlimited
    local status = never and 'never' or uncharged and 'uncharged' or 'granted' -- of take.lua's reply
    if status == 'granted' then
      local id = call.leases and lease_id(call, call.id_base .. format('%02x', taken.n + 1))
      windows.charge(call, list, ticket.costs.windows, at, 0, id)
      fair.move_tags(flow, ticket.costs, 1)
      if L.order then L.order.note_grant(flow, list, ticket.costs) end
    else
      at = now
      heads.reopen(flow, nil)
    end
    add_to_reply(taken, flow, ticket, status, at)
    flow.head, flow.popped = flow.head + 1, flow.popped + 1
    heads.forget(flow, ticket.id, ticket.costs)
    local second = flow.n > 0 and heads.first_ticket(flow) or nil
    move_first(root, flow, second and ROOT, (second or flow).rank, second and fair.score(root, flow, second.rank))
  end

  -- pass_on lets the first flow of a node wait at the one of `suffix`, where takes look at it from `time` on.
  local function pass_on(node, flow, ticket, suffix, time)
    local other = L.node_of(node.queue, suffix)
    flow.passed, other.list = true, nil
    move_first(node, flow, suffix, ticket.rank, fair.score(other, flow, ticket.rank))
    heads.due_by(node.queue, suffix, time)
    if L.order then L.order.moved(suffix) end
    local scope = node.shared and suffix == ROOT and call.open[node.suffix]
    if scope then -- the room that the flow will take is not free for the next
      scope.ahead = scope.ahead or {}
      for unit, cost in pairs(ticket.costs.units) do scope.ahead[unit] = (scope.ahead[unit] or 0) + cost end
    end
    if node.suffix == ROOT then heads.reopen(flow, suffix) end
  end

  -- visit lets flows of a node that need not wait there go on, in order. At ROOT it takes their tickets: up to `want`
  -- in this take, or `only_one`, as other sides may go next. It reads n flows at a time, and returns the steps left.
  local function visit(node, steps, n, taken, want, only_one)
    while steps > 0 do
      steps = steps - 1
      local flow, ticket = head_of(node, n)
      local tag = flow and node.shared and fair.tag_of(node, flow) or 0
      if not flow then
        heads.set_due(node.queue, node.suffix, false)
        return steps
      elseif tag > flow.score then
        move_first(node, flow, node.suffix, flow.rank, tag) -- the tag has moved since, by a grant at another node
      else
        local blocked, time, never = heads.blocker(flow, ticket.costs)
        local suffix = blocked or ROOT
        if suffix ~= node.suffix then
          pass_on(node, flow, ticket, suffix, blocked and time or now)
        elseif blocked or taken.n >= want then
          heads.set_due(node.queue, suffix, blocked and time or now)
          return steps
        else
          hand_out(node, flow, ticket, taken, time, never)
          if only_one then return steps end
        end
      end
    end
    heads.set_due(node.queue, node.suffix, now)
    return steps
  end

  -- advance lets a side's flows that have room where they wait go on to the next node without room, or to ROOT.
  local function advance(q, taken)
    local key, steps = P .. 'd:' .. q.queue, STEPS
    local found = redis.call('ZRANGEBYSCORE', key, '-inf', format('%d', now), 'LIMIT', '0', DUE)
    for i = 1, #found do
      if q.dues[found[i]] == nil then q.dues[found[i]] = now end
    end
    for i = 1, #found do
      local time = q.dues[found[i]]
      if found[i] ~= ROOT and time and time <= now then
        steps = visit(L.node_of(q.queue, found[i]), steps, 4, taken, 0, false) -- it takes none
      end
    end
    for _, scope in pairs(call.open) do scope.ahead = nil end
  end

  local function due_now(q)
    local time = q.n > 0 and heads.due_at(q.queue, ROOT)
    return time and time <= now
  end

  -- serve takes tickets of sides until there are `want`, or none fits. Then it finds when the next one fits.
  local function serve(sides, want, taken)
    local left, got, steps = {}, {}, STEPS + want
    for i = 1, #sides do
      advance(sides[i], taken)
      if due_now(sides[i]) then left[#left + 1] = sides[i] end
    end
    while left[1] and steps > 0 do
      local i, share, several, before = 1, 1, left[2] ~= nil, taken.n
      if several then i, share = L.order.first(left) end
      local q = left[i]
      steps = visit(q, steps, ceil((want - before) * share) + 1, taken, want, several)
      got[q] = (got[q] or 0) + taken.n - before
      -- Of several sides each is visited once more when the take is full, only to tell when its next ticket fits.
      if not several or before >= want or not due_now(q) then table.remove(left, i) end
    end
    for i = 1, #sides do
      local q = sides[i]
      appointments.took(q, now, got[q] or 0, want > 0 and taken.n >= want and due_now(q))
    end
  end

  -- look_at_changes makes all nodes due after limits have changed, as new limits may let in more: in each take some
  -- nodes of each queue, until the queue's `rescan` is "-". A scan begins if the clock was set back, or if the last
  -- one has ended and began CHANGES us ago. A take with new limits that comes sooner notes by "-" that one is needed.
  local function look_at_changes()
    local text, begins = redis.call('GET', P .. 'l') or '', false
    local since, known = match(text, '^(%d+) (.*)$') -- of the last scan; nil in a new line, which needs none
    local too_soon = known and now >= since + 0 and now < since + CHANGES
    for _, q in pairs(L.queues) do
      if q.asked > now then q.asked, q.changed, begins = now, true, true end -- the clock was set back
      too_soon = too_soon or known and q.rescan ~= '-' -- the last scan goes on
    end
    if known ~= L.limits and not too_soon then
      redis.call('SET', P .. 'l', format('%d ', now) .. L.limits, 'EX', L.ttl)
      begins = begins or known
    elseif known ~= L.limits and known ~= '-' then
      redis.call('SET', P .. 'l', since .. ' -', 'EX', L.ttl)
    end
    for _, q in pairs(L.queues) do
      if begins then q.rescan, q.changed = '0', true end
      local found = q.rescan ~= '-' and redis.call('ZSCAN', P .. q.dues_key, q.rescan, 'COUNT', LOOKS)
      for k = 1, found and #found[2] or 0, 2 do heads.due_by(q.queue, found[2][k], now) end
      if found then q.rescan, q.changed = found[1] == '0' and '-' or found[1], true end
    end
    L.flush()
  end

  -- restore puts back tickets that a process took and has not acknowledged, at their ranks. They stay charged.
  local function restore(record)
    local J = new_join(L)
    for ticket in gmatch(sub(record, 36), '[^\n]+') do -- after seq, at, next and id_base: see take.lua
      local id, text, key, tenant, weight, suffixes, settings =
        match(ticket, '^(%S+) (%S+ %S+ (%S+)) (%S+) %l%S* (%S+) ([^;]*);([^\t]*)')
      if not L.read('t', id) then
        local values, costs, rank = L.ticket(id, text)
        local flow_id = match(id, '^[^/]*') .. values
        local flow = L.flow_of(flow_id) or L.new_flow(flow_id, weight + 0, tenant, suffixes, settings)
        J.join({
          ticket = id, flow = flow_id, queue = flow.queue, weight = weight + 0, tenant = tenant,
          suffixes = flow.suffixes, settings = settings, costs_text = costs, key = key, rank = rank,
        }, heads.scopes_of(flow))
      end
    end
  end

  -- next_time returns when to ask these queues again, 0 if nobody waits there: in a pause of the policy not at once.
  local function next_time(names, appointment)
    local soonest_q, time = nil, 0
    for i = 1, #names do
      local q = L.queues[names[i]]
      if q and q.n == 0 and q.last > 0 then
        q.first, q.last, q.changed = 0, 0, true -- its servers ask when they are nudged
      elseif q and q.n > 0 then
        local soonest = redis.call('ZRANGE', P .. 'd:' .. q.queue, '0', '0', 'WITHSCORES')[2]
        local due = soonest and soonest + 0 or now + appointments.LATEST
        if q.rescan ~= '-' then due = min(due, now + appointments.SPACING) end -- see look_at_changes
        if not soonest_q or due < time then soonest_q, time = q, due end
      end
    end
    if not soonest_q then return 0 end
    local at = appointments.next(soonest_q, now, max(time, call.paused or 0), appointment)
    for i = 1, at > now and #names or 0 do
      local q = L.queues[names[i]]
      if q and q.n > 0 and q ~= soonest_q then appointments.cover(q, now, at, appointment) end
    end
    return at
  end

  -- ask_for notes that these queues are asked for, together. It returns their sides that wait, and all names.
  local function ask_for(queues)
    local names, sides, server = {}, {}, nil
    for i = 1, #queues do names[i] = queues[i].name end
    for i = 1, call.batches and #queues or 0 do names[#names + 1] = names[i] .. '!' end
    for i = 1, #names do
      local q = L.queues[names[i]]
      if q and (not server or q.server < server) then server = q.server end
    end
    for i = 1, #names do
      local q = L.queues[names[i]]
      if q then
        q.asked, q.server, q.changed = now, server, true
        q.priority = queues[(i - 1) % #queues + 1].priority
        if q.n > 0 then sides[#sides + 1] = q end
      end
    end
    return sides, names
  end

  -- take takes up to `want` tickets from the queues, a list of {name, priority}; during a pause of the policy none.
  -- strict: priorities are strict; appointment: the last one of the process. It returns when to ask again, 0 if nobody
  -- waits there.
  local function take(queues, strict, want, appointment, taken)
    look_at_changes()
    local sides, names = ask_for(queues)
    if call.batches or next(L.queues, next(L.queues)) then L.order = new_order(L, names, strict) end
    serve(sides, call.paused and 0 or want, taken)
    if L.order then L.order.write() end
    L.flush()
    return next_time(names, appointment)
  end

  return {restore = restore, take = take}
end
