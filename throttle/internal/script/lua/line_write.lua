-- line_write.lua: writes to Redis what has changed of a line.
--
-- Verbs only note what has changed. So a key is written once for all requests of a call.
--
-- add_writing(L) adds to a line:
--   change(key, member, score)   notes the score that a sorted set gets for a member; false: it leaves
--   flush()                      writes these changes, and where flows wait, before somebody reads them
--   finish()                     writes all, when nothing else follows

local DAY = 86400 -- seconds for which a line's keys are kept, at least
local function expire(key, seconds) redis.call('EXPIRE', key, seconds) end
local function add_writing(L)
  local PART = 4000 -- values in one call to Redis; even, as many are pairs

  -- call_in_parts calls a command on a list of values, which may be too long for one call.
  local function call_in_parts(name, key, list)
    for from = 1, #list, PART do
      redis.call(name, key, unpack(list, from, min(#list, from + PART - 1)))
    end
  end

  local call = L.call
  local P, now, flows, rank, hour = call.P, call.now, L.flows, L.rank, format('%d', call.now / 3600000000)
  local changes = {} -- of sorted sets: scores by member, by key

  function L.change(key, member, score)
    local scores = changes[key]
    if not scores then
      scores = {}
      changes[key] = scores
    end
    scores[member] = score
  end

  function L.flush()
    for id, flow in pairs(flows) do
      local suffix, rank = flow and flow.suffix, flow and flow.rank
      local stored = flow and flow.stored_suffix
      local moved = stored ~= suffix or suffix and rank ~= flow.stored_rank
      if flow and (moved or suffix and flow.score and flow.score ~= flow.stored_score) then
        local nodes = 'n:' .. flow.queue .. '|'
        if stored and moved then L.change(nodes .. stored, flow.stored_rank .. ' ' .. id, false) end
        if suffix then L.change(nodes .. suffix, rank .. ' ' .. id, flow.score) end
        flow.changed = flow.changed or moved
        flow.stored_suffix, flow.stored_rank, flow.stored_score = suffix, rank, flow.score
      end
    end
    for key, scores in pairs(changes) do
      local add, n, gone = {nil, nil, nil, nil}, 0, nil
      for member, score in pairs(scores) do
        if score then
          add[n + 1], add[n + 2] = format('%d', score), member
          n = n + 2
        else
          gone = gone or {}
          gone[#gone + 1] = member
        end
      end
      key = P .. key
      if gone then call_in_parts('ZREM', key, gone) end
      if n > 0 then call_in_parts('ZADD', key, add) end
      if n > 0 and not find(key, ':f:', #P, true) then expire(key, L.ttl) end -- see write_flows
    end
    changes = {}
  end

  -- A flow's tickets are renewed once an hour.
  local function write_flows()
    for id, flow in pairs(flows) do
      if flow and flow.popped > 0 then
        redis.call('ZREMRANGEBYRANK', P .. 'f:' .. id, '0', format('%d', flow.popped - 1))
      end
      if flow and flow.n == 0 then
        L.write('f', id, false)
      elseif flow and flow.changed then
        if flow.hour ~= hour then expire(P .. 'f:' .. id, L.ttl) end
        L.write('f', id, format('%d %s %s %d %d ', flow.n, line_units.text(flow), hour, flow.weight,
          flow.tag) .. (flow.suffix or '-') .. ' ' .. (flow.rank or '-') .. ' ' .. flow.tenant ..
          ' ' .. flow.suffixes_text .. ';' .. flow.own_text)
      end
    end
  end

  -- Of tenants' tags those are kept that are above V. The others are the same as V, which passes
  -- tags of tenants that may never come back.
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
          q.first, q.last, q.server, q.since, q.taken, q.flows, q.priority, q.look, q.v,
          line_units.text(q)))
      end
    end
  end

  local function write_hash(key, changed)
    local values, set, gone = L.fields[key], {}, {}
    local n = 0
    for field in pairs(changed) do
      local value = values[field]
      if value then
        set[n + 1], set[n + 2] = field, value
        n = n + 2
      else
        gone[#gone + 1] = field
      end
    end
    call_in_parts('HSET', P .. key, set)
    call_in_parts('HDEL', P .. key, gone)
  end

  -- A line without tickets has no keys.
  function L.finish()
    L.flush()
    write_flows()
    write_nodes()
    if L.count <= 0 then
      local keys = {P .. 'q', P .. 'l', P .. 't', P .. 'f', P .. 'u', P .. 'z'}
      for _, q in pairs(L.queues) do keys[#keys + 1] = P .. q.dues_key end
      redis.call('DEL', unpack(keys))
      return
    end
    for key, changed in pairs(L.written) do
      if next(changed) then write_hash(key, changed) end
      if L.hour ~= hour then expire(P .. key, L.ttl) end
    end
    if L.hour ~= hour then expire(P .. 'l', L.ttl) end
    if L.rank ~= rank or L.count ~= L.before or L.hour ~= hour then
      redis.call('SET', P .. 'q', format('%d %d %s', L.count, L.rank, hour), 'EX', L.ttl)
    end
  end
end
