-- line_write.lua: writes to Redis what has changed of a line.
--
-- Verbs only note what has changed. So a key is written once for all requests of a call.
--
-- add_writing(L) adds to a line:
--   flush_added()    writes the tickets that joined in this call, before somebody reads their flows
--   flush_places()   writes at which nodes flows wait
--   flush_dues()     writes when nodes are due
--   finish()         writes all, when nothing else follows

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
  local changes = {} -- of sorted sets, by key

  -- change notes the score that a sorted set gets for a member; without one the member leaves.
  local function change(key, member, score)
    local of_key = changes[key]
    if not of_key then
      of_key = {add = {}, gone = {}}
      changes[key] = of_key
    end
    local list = score and of_key.add or of_key.gone
    if score then list[#list + 1] = format('%d', score) end
    list[#list + 1] = member
  end

  local function write_changes()
    for key, of_key in pairs(changes) do
      call_in_parts('ZREM', key, of_key.gone)
      call_in_parts('ZADD', key, of_key.add)
      if of_key.add[1] then expire(key, L.ttl) end
    end
    changes = {}
  end

  function L.flush_added()
    if not next(L.added) then return end
    for id, list in pairs(L.added) do call_in_parts('ZADD', P .. 'f:' .. id, list) end
    L.added = {}
  end

  function L.flush_places()
    for id, flow in pairs(flows) do
      local suffix, rank = flow and flow.suffix, flow and flow.rank
      local stored = flow and flow.stored_suffix
      local moved = stored ~= suffix or suffix and rank ~= flow.stored_rank
      if flow and (moved or suffix and flow.score and flow.score ~= flow.stored_score) then
        local nodes = P .. 'n:' .. flow.queue .. '|'
        if stored and moved then change(nodes .. stored, flow.stored_rank .. ' ' .. id) end
        if suffix then change(nodes .. suffix, rank .. ' ' .. id, flow.score) end
        flow.changed = flow.changed or moved
        flow.stored_suffix, flow.stored_rank, flow.stored_score = suffix, rank, flow.score
      end
    end
    write_changes()
  end

  function L.flush_dues()
    for name, q in pairs(L.queues) do
      for suffix in pairs(q.dues_changed) do change(P .. 'd:' .. name, suffix, q.dues[suffix]) end
      q.dues_changed = {}
    end
    write_changes()
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
    if not node.shared or not (node.new_tags or node.moved) then return end
    local tags = P .. 'g:' .. node.key
    if node.n == 0 then -- nobody is left to be fair to
      redis.call('DEL', tags)
      node.v = 0
      return
    end
    for tenant, tag in pairs(node.new_tags or {}) do
      change(tags, tenant, tag > node.v and tag) -- else a ticket was put back, and its charge undone
    end
    redis.call('ZREMRANGEBYSCORE', tags, '-inf', format('%d', node.v))
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
        redis.call('DEL', P .. 'd:' .. name)
        q.dues_changed = {}
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
    if not L.queues then return end
    L.flush_added()
    L.flush_places()
    write_flows()
    write_nodes()
    L.flush_dues()
    if L.count <= 0 then
      local keys = {P .. 'q', P .. 'l', P .. 't', P .. 'f', P .. 'u', P .. 'z'}
      for name in pairs(L.queues) do keys[#keys + 1] = P .. 'd:' .. name end
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
