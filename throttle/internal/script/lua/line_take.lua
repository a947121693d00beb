-- line_take.lua: takes tickets from a line.
--
-- new_take(L) -> T, with these verbs:
--   put_back(record)   puts back the tickets that a process took and has not acknowledged, at their
--                      ranks; their units stay charged
--   take(names, want, own, taken) -> next
--                      takes up to `want` tickets of the queues, in their order, into `taken`; own
--                      is the appointment of the process; next: when to ask again, 0 if nobody
--                      waits in these queues
--
-- taken is a list of take.lua's reply, three or more values a ticket, with n, how many tickets, and
-- kept, what the record of the take will say.

local function new_take(L)
  local STEPS = 128       -- flows that one call looks at besides those that it takes from
  local DUE = '128'       -- nodes that one call looks at
  local CHANGES = 1000000 -- us between looks after changes of limits

  local call = L.call
  local P, now, ROOT = call.P, call.now, windows.ROOT
  local head_of, settle_in, move, open_node = new_lists(L)
  local T, turns = {}, nil

  -- hand_out adds a ticket to what is taken: its text, when it was granted, and how much each
  -- window has counted then. What never fits is not charged, and says nothing of the windows. The
  -- status is one of take.lua's reply, not of decide.lua's.
  local function hand_out(taken, flow, ticket, status, at)
    local n = #taken
    local text = ticket.id .. ' ' .. ticket.costs.text .. ' ' .. ticket.rank .. ' ' ..
      flow.id .. ' ' .. ticket.key .. ' ' .. flow.tenant .. ' ' .. status
    taken[n + 1], taken[n + 2] = text, at
    taken.n = taken.n + 1
    if not flow.static then -- the same for all of its tickets
      flow.static = format(' %d ', flow.weight) .. flow.list .. ';' .. flow.own_text
    end
    local kept = taken.kept
    local k = #kept
    kept[k + 1], kept[k + 2] = text, flow.static
    kept[k + 3] = at == now and '\n' or format('\t%d\n', at)
    n = n + 2
    for i = 1, #call.windows do taken[n + i] = 0 end
    if status ~= '1' then return end
    local list = flow.scopes
    for s = 1, #list do
      local of, states = list[s].of.windows, list[s].states
      for j = 1, #of do
        local i = of[j]
        taken[n + i] = call.windows[i].algorithm.used(states[i])
      end
    end
  end

  -- hand_out_first hands out the first ticket of the first flow at ROOT, whose next one then waits.
  -- at: the time of the flow's scopes, in which nothing blocks it.
  local function hand_out_first(root, flow, ticket, taken, at, never)
    local list = flow.scopes
    if never then
      hand_out(taken, flow, ticket, '7', now)
      L.reopen(flow, nil)
    elseif #list < #call.scopes -- it joined when the policy had not all of them
      or flow.own and flow.own['!'] and flow.own['!'][2] == 1 then
      hand_out(taken, flow, ticket, '8', now)
    else
      local id = call.leases and windows.lease_bytes(call.id_base .. format('%06x', taken.n + 1))
      windows.take(call, list, ticket.costs.windows, at, 0, id)
      L.charge(flow, ticket.costs, 1)
      if turns then turns.charge(flow, ticket.costs) end
      if call.classes then call.classes.charge(flow, list, ticket.costs) end
      hand_out(taken, flow, ticket, '1', at)
    end
    table.remove(root.list, 1)
    flow.head, flow.popped = flow.head + 1, flow.popped + 1
    L.forget(flow, ticket.id, ticket.costs)
    local second = flow.n > 0 and L.first_ticket(flow)
    if second then
      flow.rank, flow.changed = second.rank, true
      flow.score = L.score(root, flow)
      settle_in(root, flow)
    end
  end

  -- serve_root takes from the flows that wait for a slot, by tag.
  local function serve_root(q, want, taken, steps)
    local root = L.node_of(q.name, ROOT)
    while steps > 0 do
      steps = steps - 1
      local flow, ticket = head_of(root, want - taken.n + 1)
      if not flow then
        L.set_due(q.name, ROOT, false)
        return
      end
      local tag = L.tag_of(root, flow)
      if tag > flow.score then
        -- The tenant's tag has moved since, by a grant to another of its flows.
        table.remove(root.list, 1)
        flow.score = tag
        settle_in(root, flow)
      else
        local blocked, opens, never = L.blocker(flow, ticket.costs)
        if blocked and blocked.suffix == ROOT then
          L.set_due(q.name, ROOT, opens)
          return
        elseif blocked then
          table.remove(root.list, 1)
          move(flow, ticket, blocked.suffix, opens)
          L.reopen(flow, blocked.suffix)
        elseif taken.n >= want then
          L.set_due(q.name, ROOT, now)
          return
        else
          hand_out_first(root, flow, ticket, taken, opens, never)
        end
      end
    end
    L.set_due(q.name, ROOT, now)
  end

  -- serve takes tickets of a queue until there are `want`, or none fits.
  local function serve(q, want, taken)
    local key, steps = P .. 'd:' .. q.name, STEPS
    local found = redis.call('ZRANGEBYSCORE', key, '-inf', format('%d', now), 'LIMIT', '0', DUE)
    L.dues[q.name] = L.dues[q.name] or {}
    local known = L.dues[q.name]
    for i = 1, #found do
      if known[found[i]] == nil then known[found[i]] = now end
    end
    for i = 1, #found do
      local time = known[found[i]]
      if found[i] ~= ROOT and time and time <= now then
        steps = open_node(L.node_of(q.name, found[i]), steps)
      end
    end
    for _, scope in pairs(call.open) do scope.ahead = nil end
    local time = L.due_at(q.name, ROOT)
    if time and time <= now then
      L.turns = turns or false
      serve_root(q, want, taken, STEPS + want)
      L.turns = false
    end
  end

  -- look_at_all has all nodes of a queue due.
  local function look_at_all(q)
    if q.n == 0 then return end
    local key = P .. 'd:' .. q.name
    redis.call('ZUNIONSTORE', key, 1, key, 'WEIGHTS', '1e-6') -- long ago, in the same order
    expire(key, L.ttl)
  end

  -- look_at_changes has all nodes due after limits have changed: other limits may let in more.
  -- While workers disagree, in a rolling deploy, it does so once a second. After the clock was set
  -- back it does so too: nothing would be due until the clock has caught up.
  local function look_at_changes()
    local known, limits, set_back = L.read('u', 'limits'), windows.limits(), false
    for _, q in pairs(L.queues) do
      if q.asked > now then q.asked, q.changed, set_back = now, true, true end
    end
    local recent = known and now < L.own.limits_at + CHANGES
    if not set_back and (known == limits or recent) then return end
    L.write('u', 'limits', limits)
    L.own.limits_at, L.own.changed = now, true
    if not known and not set_back then return end
    for _, q in pairs(L.queues) do look_at_all(q) end
  end

  function T.put_back(record)
    local J = new_join(L)
    L.read_line()
    for ticket in gmatch(sub(record, 32), '[^\n]+') do
      local id, costs, rank, flow_id, key, tenant, weight, list, own =
        match(ticket, '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+) %d (%S+) ([^;]*);([^\t]*)')
      if not L.read('t', id) then
        local suffixes = {}
        for suffix in gmatch(list, '[^+]+') do suffixes[#suffixes + 1] = suffix end
        local flow = L.flow_of(flow_id) or L.new_flow(flow_id, weight + 0, tenant, suffixes, list, own)
        J.join({
          ticket = id, flow = flow_id, queue = flow.queue, weight = weight + 0, tenant = tenant,
          suffixes = suffixes, own = own, costs_text = costs, key = key, options = '', rank = rank,
        }, L.scopes_of(flow))
      end
    end
  end

  -- next_time returns when to ask these queues again, 0 if nobody waits there.
  local function next_time(names, own)
    local first, time = nil, 0
    for i = 1, #names do
      local q = L.queues[names[i]]
      if q and q.n == 0 and q.last > 0 then
        q.first, q.last, q.changed = 0, 0, true -- its servers ask when they are nudged
      elseif q and q.n > 0 then
        local head = redis.call('ZRANGE', P .. 'd:' .. q.name, '0', '0', 'WITHSCORES')[2]
        local at = head and head + 0 or appointments.latest(now)
        if not first or at < time then first, time = q, at end
      end
    end
    return first and appointments.next(first, now, time, own) or 0
  end

  -- batches_of returns the queues' sides of batches, where anything waits, and all of both classes.
  local function batches_of(names)
    local sides, all = {}, {}
    for i = 1, #names do
      local q = L.queues[names[i] .. '!']
      if q then sides[#sides + 1] = q.name end
      all[i] = names[i]
    end
    for i = 1, #sides do all[#all + 1] = sides[i] end
    return sides, all
  end

  -- serve_class serves queues of one class, in their order. owed: what batches were served before.
  local function serve_class(names, want, taken, owed)
    for i = 1, #names do
      local q = L.queues[names[i]]
      if q and q.n > 0 then
        local before = taken.n
        serve(q, want, taken)
        local due = q.n > 0 and L.due_at(q.name, ROOT)
        local full = want > 0 and taken.n >= want and due and due <= now
        appointments.took(q, now, taken.n - before + (owed and owed[i] or 0), full)
      end
    end
  end

  -- serve_classes serves live tickets before those of batches, except for what they owe these.
  local function serve_classes(names, sides, want, taken, with)
    local live, classes = turns, call.classes
    local batch = new_turns(L, sides, with, true)
    turns = batch
    local owed = {}
    for i = 1, #sides do
      owed[i] = -taken.n
      if L.queues[sides[i]].n > 0 then serve(L.queues[sides[i]], want, taken) end
      owed[i] = owed[i] + taken.n
    end
    classes.reset()
    turns = live
    serve_class(names, want, taken)
    classes.reset()
    turns = batch
    serve_class(sides, want, taken, owed)
    if batch then batch.write() end
    turns = live
  end

  function T.take(names, want, own, taken)
    local fields = {'line', 'limits'}
    for i = 1, #names do fields[2 + i] = 'n ' .. names[i] .. '|' .. ROOT end
    L.read_all('u', fields)
    L.read_line()
    look_at_changes()
    local sides, all = nil, names
    if call.batches then
      sides, all = batches_of(names)
      call.classes = new_classes(L, all)
    end
    local with = nil -- the least name of all queues that were asked for together
    local joint = false -- some were not before: room that one left to another is looked at again
    for i = 1, #all do
      local q = L.queues[all[i]]
      if q then
        joint = joint or with and q.with ~= with
        if not with or q.with < with then with = q.with end
      end
    end
    if with and next(L.queues, next(L.queues)) then turns = new_turns(L, names, with, false) end
    for i = 1, #all do
      local q = L.queues[all[i]]
      if q then
        if joint then look_at_all(q) end
        q.asked, q.with, q.changed = now, with, true
      end
    end
    if sides and sides[1] then
      serve_classes(names, sides, want, taken, with)
    else
      serve_class(names, want, taken)
    end
    if turns then turns.write() end
    L.flush()
    return next_time(all, own)
  end

  return T
end
