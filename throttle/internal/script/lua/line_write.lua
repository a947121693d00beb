-- line_write.lua: writes the changes of a line to Redis.
-- All requests of a call only note their changes, so that each key is written once.

local function expire(key, seconds) redis.call('EXPIRE', key, seconds) end
local function add_writing(L)
  -- send writes the scores of a sorted set by member, or the values of a hash by field. It deletes those that
  -- are false.
  local function send(key, values, sorted)
    local set, n, gone = {nil, nil, nil, nil}, 0, nil
    for name, value in pairs(values) do
      if not value then
        gone = gone or {}
        gone[#gone + 1] = name
      elseif sorted then
        set[n + 1], set[n + 2] = format('%d', value), name
        n = n + 2
      else
        set[n + 1], set[n + 2] = name, value
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

  -- flush writes the changes of sorted sets, before a command reads these.
  function L.flush()
    for id, flow in pairs(moved) do
      local suffix, rank, stored = flow.suffix, flow.rank, flow.stored_suffix
      local nodes, elsewhere = 'n:' .. flow.queue .. '|', stored ~= suffix or rank ~= flow.stored_rank
      if stored and elsewhere then L.change(nodes .. stored, flow.stored_rank .. ' ' .. id, false) end
      if suffix and (elsewhere or flow.score ~= flow.stored_score) then
        L.change(nodes .. suffix, rank .. ' ' .. id, flow.score)
      end
      flow.changed = flow.changed or elsewhere
      flow.stored_suffix, flow.stored_rank, flow.stored_score = suffix, rank, flow.score
    end
    moved = {}
    for key, scores in pairs(changes) do send(P .. key, scores, true) end
    changes = {}
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
        L.write('f', id, format('%d %s %d %d ', flow.n, line_units.text(flow), flow.weight, flow.tag) ..
          (flow.suffix or '-') .. ' ' .. (flow.rank or '-') .. ' ' .. flow.tenant ..
          ' ' .. flow.suffixes_text .. ';' .. flow.own_text)
      end
    end
  end

  -- A tenant's tag is kept while it is above V. A lower one counts as V, so tags of tenants that never come
  -- back are deleted.
  local function write_tags(node)
    if not node.shared or not node.moved then return end
    local tags = P .. 'g:' .. node.key
    if node.n > 0 then
      redis.call('ZREMRANGEBYSCORE', tags, '-inf', format('%d', node.v))
    else -- nobody is left to be fair to
      redis.call('DEL', tags)
      node.v = 0
    end
  end

  local function write_nodes()
    for key, node in pairs(L.nodes) do
      write_tags(node)
      if node.changed then
        L.write('u', key, node.n > 0 and format('%d %d %s', node.n, node.v, line_units.text(node)))
      end
    end
    for name, q in pairs(L.queues) do
      write_tags(q)
      if q.n == 0 and not appointments.kept(q, now) then
        L.write('z', name, false)
        redis.call('DEL', P .. q.dues_key)
      elseif q.changed then
        L.write('z', name, format('%d %d %d %d %d %s %d %d %d %d %s %d %s', q.asked, q.n, q.weights,
          q.first, q.last, q.server, q.since, q.taken, q.flows, q.priority, q.rescan, q.v,
          line_units.text(q)))
      end
    end
  end

  -- finish removes claims of ended processes, and writes all changes. A line without tickets has no keys.
  function L.finish()
    for _, q in pairs(L.queues) do
      if q.claims and q.n > 0 and not L.alive(q) then once(new_places, L).sweep(q) end
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
