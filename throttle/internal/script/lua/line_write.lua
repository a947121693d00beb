-- line_write.lua: writes the changes of a line to Redis. Requests of a call only note changes, all of hashes and most
-- of sorted sets, so that keys are written seldom.

local function expire(key, seconds) redis.call('EXPIRE', key, seconds) end
local function add_writing(L)
  -- send writes the scores of a sorted set by member, or the values of a hash by field. A value of false deletes.
  local function send(key, values, sorted)
    local set, n, gone = {nil, nil, nil, nil}, 0, nil
    for name, value in pairs(values) do
      if not value then
        gone = gone or {}
        gone[#gone + 1] = name
      else
        set[n + 1], set[n + 2] = sorted and format('%.17g', value) or name, sorted and name or value
        n = n + 2
      end
    end
    for i = 1, n, 4000 do redis.call(sorted and 'ZADD' or 'HSET', key, unpack(set, i, min(n, i + 3999))) end
    for i = 1, gone and #gone or 0, 4000 do
      redis.call(sorted and 'ZREM' or 'HDEL', key, unpack(gone, i, min(#gone, i + 3999)))
    end
    expire(key, L.ttl)
  end

  local call = L.call
  local P, now = call.P, call.now
  local changes = {} -- of sorted sets: scores by member, by key
  local moved = {}   -- flows, by name
  local crowds = {}  -- by node: changes of m:NODE, and their tenants

  -- change notes the new score of a member of a sorted set; false removes the member.
  function L.change(key, member, score)
    local scores = changes[key] or {}
    changes[key], scores[member] = scores, score
  end

  -- move notes the node at which a flow waits, and its rank and score there. Without a suffix it waits nowhere.
  function L.move(flow, suffix, rank, score)
    flow.suffix, flow.rank, flow.score = suffix, rank, score
    moved[flow.id] = flow
  end

  -- note_score notes the score of a flow at a node; false: it leaves. Where a tenant may have several flows, all
  -- stand in m:NODE, with the score 0. Of these flush puts the first one into n:NODE.
  local function note_score(flow, suffix, rank, score)
    local key, member = flow.queue .. '|' .. suffix, rank .. ' ' .. flow.id
    local node = not call.only_tenants and L.node_of(flow.queue, suffix)
    if node and node.shared then
      local crowd = crowds[node] or {members = {}, tenants = {}}
      crowds[node], crowd.tenants[flow.tenant] = crowd, true
      crowd.members[flow.tenant .. ' ' .. member], score = score and 0, false -- see above
    end
    L.change('n:' .. key, member, score)
  end

  local function put_first(node, tenant)
    local key, from, to = P .. 'm:' .. node.key, '[' .. tenant .. ' ', '(' .. tenant .. '!'
    local found = redis.call('ZRANGE', key, from, to, 'BYLEX', 'LIMIT', '0', '2')
    if not found[1] then return end
    local rank, id = match(found[1], ' (%S+) (%S+)$')
    local flow = L.flow_of(id)
    if not flow or flow.stored_suffix ~= node.suffix or flow.stored_rank ~= rank then
      redis.call('ZREM', key, found[1]) -- a leftover of a line that expired
      return put_first(node, tenant)
    end
    flow.score = made_once(new_fair, L).score(node, flow)
    L.change('n:' .. node.key, rank .. ' ' .. id, flow.score)
    if found[2] then L.change('n:' .. node.key, sub(found[2], #tenant + 2), false) end -- it may have been first
  end

  -- flush writes the changes of sorted sets, before a command reads these.
  function L.flush()
    for _, flow in pairs(moved) do
      local suffix, rank, stored = flow.suffix, flow.rank, flow.stored_suffix
      local elsewhere = stored ~= suffix or rank ~= flow.stored_rank
      if stored and elsewhere then note_score(flow, stored, flow.stored_rank, false) end
      if suffix then note_score(flow, suffix, rank, flow.score) end
      flow.changed = flow.changed or elsewhere
      flow.stored_suffix, flow.stored_rank = suffix, rank
    end
    for node, crowd in pairs(crowds) do
      send(P .. 'm:' .. node.key, crowd.members, true)
      for tenant in pairs(crowd.tenants) do put_first(node, tenant) end
    end
    moved, crowds = {}, {}
    for key, scores in pairs(changes) do send(P .. key, scores, true) end
    changes = {}
  end

  -- count_flows returns a lower bound of the flows at a node: calls with only_tenants write n:NODE alone.
  function L.count_flows(key)
    local n = redis.call('ZCARD', P .. 'n:' .. key)
    return (n == 0 or call.only_tenants) and n or max(n, redis.call('ZCARD', P .. 'm:' .. key))
  end

  local function write_flows()
    for id, flow in pairs(L.flows) do
      if flow.popped > 0 then
        redis.call('ZREMRANGEBYRANK', P .. 'f:' .. id, '0', format('%d', flow.popped - 1))
        expire(P .. 'f:' .. id, L.ttl)
      end
      if flow.n == 0 then
        L.write('f', id, false)
      elseif flow.changed then
        L.write('f', id, format('%d %s %d %.17g ', flow.n, line_units.text(flow), flow.weight, flow.tag) ..
          (flow.suffix or '-') .. ' ' .. (flow.rank or '-') .. ' ' .. flow.tenant ..
          ' ' .. flow.suffixes_text .. ';' .. flow.settings_text)
      end
    end
  end

  -- A tenant's tag is kept while it is above V, as a lower one counts as V. So tags of absent tenants are dropped.
  local function write_tags(node)
    if not node.shared or not node.moved then return end
    local tags = P .. 'g:' .. node.key
    if node.n > 0 then
      redis.call('ZREMRANGEBYSCORE', tags, '-inf', format('%.17g', node.v))
    else -- nobody is left to be fair to
      redis.call('DEL', tags)
      node.v = 0
    end
  end

  local function write_nodes()
    for key, node in pairs(L.nodes) do
      write_tags(node)
      if node.changed then
        L.write('u', key, node.n > 0 and format('%d %.17g %s', node.n, node.v, line_units.text(node)))
      end
    end
    for name, q in pairs(L.queues) do
      write_tags(q)
      if q.n == 0 and not appointments.served(q, now) then
        L.write('z', name, false)
        redis.call('DEL', P .. q.dues_key)
      elseif q.changed then
        L.write('z', name, format('%d %d %d %d %d %s %d %d %d %d %s %.17g %s', q.asked, q.n, q.weights,
          q.first, q.last, q.server, q.since, q.taken, q.flows, q.priority, q.rescan, q.v,
          line_units.text(q)))
      end
    end
  end

  -- finish removes claims of ended processes, and writes all changes. Without tickets few keys stay: line.lua.
  function L.finish()
    for _, q in pairs(L.queues) do
      if q.claims and q.n > 0 and not L.alive(q) then made_once(new_heads, L).sweep(q) end
    end
    L.flush()
    write_flows()
    write_nodes()
    if L.tickets <= 0 then
      local keys = {P .. 'q', P .. 'l', P .. 't', P .. 'f', P .. 'u', P .. 'z'}
      for _, q in pairs(L.queues) do keys[#keys + 1] = P .. q.dues_key end
      redis.call('DEL', unpack(keys))
      return
    end
    for key, values in pairs(L.written) do send(P .. key, values, false) end
    expire(P .. 'l', L.ttl)
    redis.call('SET', P .. 'q', format('%d %d', L.tickets, L.rank), 'EX', L.ttl)
  end
end
