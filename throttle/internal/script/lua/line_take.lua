-- line_take.lua: who is taken from a line.
--
-- new_take(L) -> T, with these verbs:
--   put_back(record)               puts back what a process took that has not said so since: at their ranks; units stay charged
--   take(names, want, own, taken)  takes up to `want` tickets of the queues, in their order, into taken; own is the appointment that
--                                  the process had. It returns when to ask again, 0 if nobody waits in these queues

local new_take
do
local match, gmatch, sub, format = string.match, string.gmatch, string.sub, string.format
local max, min, ceil = math.max, math.min, math.ceil

local STEPS = 128       -- how many flows one call looks at, at the most, beside those it takes
local SPACING = 5000    -- us between appointments
local LATEST = 1000000  -- us until the latest appointment
local FORGET = 10000    -- us after which an appointment that was not kept is forgotten

function new_take(L)
  local call = L.call
  local P, now, ROOT = call.P, call.now, windows.ROOT
  local T, turns = {}, nil

  -- The first flows of a node, in order, with their tickets and scopes, in a few calls.
  local function load_list(node, n)
    local found
    if call.only_tenants then
      found = redis.call('ZRANGE', P .. 'n:' .. node.name, '0', format('%d', n - 1))
    else
      found = redis.call('ZRANGE', P .. 'n:' .. node.name, '0', format('%d', n - 1), 'WITHSCORES')
    end
    local step = call.only_tenants and 1 or 2
    local ids, members = {}, {}
    for i = 1, #found, step do
      ids[#ids + 1] = sub(found[i], 18)
      members[#members + 1] = found[i]
    end
    L.read_all('f', ids)
    local list, suffixes, seen, stale = {}, {}, {}, {}
    for k = 1, #ids do
      local flow = L.flow_of(ids[k])
      if not flow or flow.suffix ~= node.suffix or flow.stored_rank ~= sub(members[k], 1, 16) then
        stale[#stale + 1] = members[k]
      else
        if not flow.score then
          if not node.shared then
            flow.score = flow.rank + 0
          elseif call.only_tenants then
            flow.score = flow.tag
          else
            flow.score = found[2 * k] + 0
          end
          flow.stored_score = flow.score
        end
        list[#list + 1] = flow
        for i = 1, #flow.suffixes do
          local suffix = flow.suffixes[i]
          if not call.open[suffix] and call.raw[suffix] == nil and not seen[suffix] then
            seen[suffix] = true
            suffixes[#suffixes + 1] = suffix
          end
        end
      end
    end
    if stale[1] then redis.call('ZREM', P .. 'n:' .. node.name, unpack(stale)) end
    node.list, node.more = list, #ids == n
    scopes.read(call, suffixes)
    -- The tickets of all of them in one call: a few each, as many as may be taken.
    local heads, per_flow, tickets = {}, format('%d', min(15, ceil(n / max(1, #list)))), {}
    for k = 1, #list do
      local flow = list[k]
      if not flow.heads and flow.popped == 0 then
        flow.heads, flow.head = redis.call('ZRANGE', P .. 'f:' .. flow.id, '0', per_flow), 1
        for i = 1, #flow.heads do tickets[#tickets + 1] = flow.heads[i] end
      end
    end
    L.read_all('t', tickets)
  end

  -- head_of is the first flow of a node with its first ticket; what is stale is dropped.
  local function head_of(node, n)
    while true do
      if not node.list or not node.list[1] and node.more then
        L.flush_places()
        load_list(node, n)
      end
      local flow = node.list[1]
      if not flow then
        if not node.more then return nil end
      else
        local ticket = flow.suffix == node.suffix and L.first_ticket(flow)
        if ticket then return flow, ticket end
        table.remove(node.list, 1)
        if flow.suffix == node.suffix then flow.suffix, flow.changed = nil, true end -- nothing is left of it
      end
    end
  end

  -- settle_in puts a flow in its place by its new score.
  local function settle_in(node, flow)
    local list, score = node.list, flow.score
    local i = #list
    while i > 0 and (list[i].score > score or list[i].score == score and list[i].rank > flow.rank) do i = i - 1 end
    if i == #list and node.more then return end -- behind some that were not read
    table.insert(list, i + 1, flow)
  end

  -- move has a flow wait at another node of its queue.
  local function move(flow, ticket, suffix, time)
    local node = L.node_of(flow.queue, suffix)
    flow.suffix, flow.rank, flow.changed = suffix, ticket.rank, true
    flow.score = L.score(node, flow)
    if node.list then settle_in(node, flow) end
    L.due(flow.queue, suffix, time)
  end

  -- open_node looks at a node of some tenants that is due: who has room there goes where it waits next.
  local function open_node(node, steps)
    while steps > 0 do
      steps = steps - 1
      local flow, ticket = head_of(node, 4)
      if not flow then
        L.set_due(node.queue, node.suffix, false)
        return steps
      end
      local blocked, time = L.blocker(flow, ticket.costs)
      if blocked and blocked.suffix == node.suffix then
        L.set_due(node.queue, node.suffix, time)
        return steps
      end
      table.remove(node.list, 1)
      move(flow, ticket, blocked and blocked.suffix or ROOT, blocked and time or now)
      local scope = node.shared and flow.suffix == ROOT and call.open[node.suffix]
      if scope then -- what it will take is not free for the next
        scope.ahead = scope.ahead or {}
        for unit, cost in pairs(ticket.costs.units) do scope.ahead[unit] = (scope.ahead[unit] or 0) + cost end
      end
    end
    return steps
  end

  -- hand_out adds a ticket to what is taken: a text, when it was granted, and how much each window has then.
  local function hand_out(taken, flow, ticket, status, at)
    local n = #taken
    taken[n + 1] = ticket.id .. ' ' .. ticket.costs.text .. ' ' .. ticket.rank .. ' ' .. flow.id .. ' ' .. ticket.key .. ' ' .. flow.tenant .. ' ' .. status
    taken[n + 2] = at
    taken.n = taken.n + 1
    if not flow.static then flow.static = format(' %d ', flow.weight) .. table.concat(flow.suffixes, '+') .. ';' .. flow.own_text end
    taken.kept[taken.n] = taken[n + 1] .. flow.static .. (at == now and '\n' or format('\t%d\n', at))
    n = n + 2
    for i = 1, #call.windows do taken[n + i] = 0 end
    if status ~= '1' then return end
    local list = flow.scopes
    for s = 1, #list do
      local of, states = list[s].of.windows, list[s].states
      for j = 1, #of do taken[n + of[j]] = call.windows[of[j]].algorithm.used(states[of[j]]) end
    end
  end

  local function pop(flow, ticket)
    flow.head, flow.popped = flow.head + 1, flow.popped + 1
    L.forget(flow, ticket.id, ticket.costs)
  end

  -- serve_root takes from those that wait for a slot, by tag.
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
        -- The tenant's tag has moved since, by another flow of its.
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
          if never then
            hand_out(taken, flow, ticket, '7', now)
            L.reopen(flow, nil)
          elseif #L.scopes_of(flow) < #call.scopes then -- it joined when the policy had not all of them
            hand_out(taken, flow, ticket, '8', now)
          else
            local list, at = L.scopes_of(flow)
            local id = call.leases and windows.lease_bytes(call.id_base .. format('%06x', taken.n + 1))
            windows.take(call, list, ticket.costs.windows, at, 0, id)
            L.charge(flow, ticket.costs, 1)
            if turns then turns.charge(flow, ticket.costs) end
            hand_out(taken, flow, ticket, '1', at)
          end
          table.remove(root.list, 1)
          pop(flow, ticket)
          local second = flow.n > 0 and L.first_ticket(flow)
          if second then
            flow.rank, flow.changed = second.rank, true
            flow.score = L.score(root, flow)
            settle_in(root, flow)
          end
        end
      end
    end
    L.set_due(q.name, ROOT, now)
  end

  -- serve takes tickets of a queue until there are `want`, or none fits.
  local function serve(q, want, taken)
    local steps = STEPS
    local found = redis.call('ZRANGEBYSCORE', P .. 'd:' .. q.name, '-inf', format('%d', now), 'LIMIT', '0', '128')
    L.dues[q.name] = L.dues[q.name] or {}
    local known, root_due = L.dues[q.name], false
    for i = 1, #found do
      if known[found[i]] == nil then known[found[i]] = now end
    end
    for i = 1, #found do
      local time = known[found[i]]
      if found[i] ~= ROOT and time and time <= now then steps = open_node(L.node_of(q.name, found[i]), steps) end
    end
    for _, scope in pairs(call.open) do scope.ahead = nil end
    local time = L.due_at(q.name, ROOT)
    if time and time <= now then
      L.turns = turns
      serve_root(q, want, taken, STEPS + want)
      L.turns = nil
    end
  end

  -- Other limits may let in whoever waits, and everybody has to be looked at again. While workers
  -- disagree, in a rolling deploy, that is once a second. So it is after the clock was set back: nobody would be due for as long.
  local function look_at_changes()
    local known, limits, set_back = L.read('u', 'limits'), windows.limits(), false
    for _, q in pairs(L.queues) do
      if q.asked > now then q.asked, q.changed, set_back = now, true, true end
    end
    if not set_back and (known == limits or known and now < L.limits_at + 1000000) then return end
    L.write('u', 'limits', limits)
    L.limits_at, L.line_changed = now, true
    if not known and not set_back then return end
    for name, q in pairs(L.queues) do
      if q.n > 0 then
        redis.call('ZUNIONSTORE', P .. 'd:' .. name, 1, P .. 'd:' .. name, 'WEIGHTS', '1e-6')
        expire(P .. 'd:' .. name, L.ttl)
      end
    end
  end

  function T.put_back(record)
    local J = new_join(L)
    L.read_line()
    for ticket in gmatch(sub(record, 32), '[^\n]+') do
      local id, costs, rank, flow_id, key, tenant, weight, list, own = match(ticket, '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+) 1 (%S+) ([^;]*);([^\t]*)')
      if id and not L.read('t', id) then -- what never fits is not put back
        local suffixes = {}
        for suffix in gmatch(list, '[^+]+') do suffixes[#suffixes + 1] = suffix end
        local flow = L.flow_of(flow_id) or L.new_flow(flow_id, weight + 0, tenant, suffixes, own)
        J.join({ticket = id, flow = flow_id, queue = flow.queue, weight = weight + 0, tenant = tenant, suffixes = suffixes, own = own,
          costs_text = costs, key = key, options = '', rank = rank}, L.scopes_of(flow))
      end
    end
  end

  -- appointment is when a server that asks now shall ask again.
  local function appointment(q, time, own)
    if time <= now then return now end
    if q.last < now - FORGET or q.last == own or time < q.first then
      q.first, q.last = time, time
    else
      local last = q.last
      q.last = max(time, last + SPACING)
      if q.last > last + SPACING then q.first = q.last end
    end
    if q.last > now + LATEST then
      q.last = now + LATEST
      q.first = min(q.first, q.last)
    end
    q.changed = true
    return q.last
  end

  function T.take(names, want, own, taken)
    local fields = {'line', 'limits'}
    for i = 1, #names do fields[2 + i] = 'n ' .. names[i] .. '|' .. ROOT end
    L.read_all('u', fields)
    L.read_line()
    look_at_changes()
    local with = nil -- the least name of all that were asked for together
    for i = 1, #names do
      local q = L.queues[names[i]]
      if q and (not with or q.with < with) then with = q.with end
    end
    if with and next(L.queues, next(L.queues)) then turns = new_turns(L, names, with) end
    for i = 1, #names do
      local q = L.queues[names[i]]
      if q then
        q.asked, q.with, q.changed = now, with, true
        if q.n > 0 then serve(q, want, taken) end
      end
    end
    if turns then turns.write() end
    L.flush()
    local first, time = nil, 0
    for i = 1, #names do
      local q = L.queues[names[i]]
      if q and q.n == 0 and q.last > 0 then
        q.first, q.last, q.changed = 0, 0, true -- servers of an empty queue ask when they are nudged
      elseif q and q.n > 0 then
        local head = redis.call('ZRANGE', P .. 'd:' .. q.name, '0', '0', 'WITHSCORES')[2]
        local at = head and head + 0 or now + LATEST
        if not first or at < time then first, time = q, at end
      end
    end
    if not first then return 0 end
    return appointment(first, time, own)
  end

  return T
end
end
