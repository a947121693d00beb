-- line_write.lua: writes to Redis what has changed of a line.
--
-- Verbs only note what has changed. So a key is written once for all requests of a call.
--
-- add_writing(L) adds to a line:
--   flush_added()    writes the tickets that joined in this call, before somebody reads their flows
--   flush_places()   writes at which nodes flows wait
--   flush_dues()     writes when nodes are due
--   flush()          writes all but the queues' records; it may be called more than once
--   finish()         writes all that is left, when nothing else follows

local DAY = 86400 -- seconds for which a line's keys are kept, at least
local function expire(key, seconds) redis.call('EXPIRE', key, seconds) end
local function add_writing(L)
  local PART = 4000 -- values in one call to Redis; even, as many are pairs

  -- call_in_parts calls a command on a list of values, which may be too long for one call.
  local function call_in_parts(name, key, list)
    local n = #list
    if n == 0 then return end
    if n <= PART then
      redis.call(name, key, unpack(list))
      return
    end
    for from = 1, n, PART do redis.call(name, key, unpack(list, from, min(n, from + PART - 1))) end
  end

  local call = L.call
  local P, hour, flows = call.P, L.hour, L.flows
  local changes = {} -- of sorted sets, by key

  -- change notes the score that a sorted set gets for a member; without one the member leaves.
  local function change(key, member, score)
    local of = changes[key]
    if not of then
      of = {add = {}, gone = {}}
      changes[key] = of
    end
    if score then of.add[#of.add + 1] = format('%d', score) end
    local list = score and of.add or of.gone
    list[#list + 1] = member
  end

  local function write_changes()
    for key, of in pairs(changes) do
      call_in_parts('ZREM', key, of.gone)
      call_in_parts('ZADD', key, of.add)
      if of.add[1] then expire(key, L.ttl) end
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

  -- A flow's tickets are renewed once an hour.
  local function flush_flows()
    for id, flow in pairs(flows) do
      if flow then
        if flow.popped > 0 then
          redis.call('ZREMRANGEBYRANK', P .. 'f:' .. id, '0', format('%d', flow.popped - 1))
          flow.popped, flow.heads, flow.first, flow.read_to_end = 0, nil, nil, nil
        end
        if flow.n == 0 then
          if flow.gone then L.write('f', id, false) end
          flows[id] = nil
        elseif flow.changed then
          if flow.hour ~= hour then
            expire(P .. 'f:' .. id, L.ttl)
            flow.hour = hour
          end
          local rest = flow.rest or format('%s %s %s %s;%s', flow.suffix or '-', flow.rank or '-',
            flow.tenant, flow.list, flow.own_text)
          L.write('f', id, format('%d %s %s %d %d ', flow.n, line_units.text(flow), hour, flow.weight,
            flow.tag) .. rest)
          flow.changed = false
        end
      end
    end
  end

  -- write_tags writes the tenants' tags that are above V. The others are the same as V.
  local function write_tags(node)
    local key = P .. 'g:' .. node.name
    for tenant, tag in pairs(node.new_tags or {}) do
      change(key, tenant, tag > node.v and tag) -- else a ticket was put back, and its charge undone
    end
    write_changes()
    redis.call('ZREMRANGEBYSCORE', key, '-inf', format('%d', node.v))
    node.new_tags, node.moved = nil, false
  end

  local function flush_nodes()
    for name, node in pairs(L.nodes) do
      if node.changed then
        node.changed = false
        if node.n == 0 then
          L.write('u', 'n ' .. name, false)
          node.v = 0
          if node.shared then -- nobody is left to be fair to
            redis.call('DEL', P .. 'g:' .. name)
            node.tags, node.new_tags, node.moved = nil, nil, false
          end
        else
          L.write('u', 'n ' .. name, format('%d %d %s', node.n, node.v, line_units.text(node)))
        end
      end
      -- When V moves it passes tags of tenants that may never come back.
      if node.new_tags or node.moved then write_tags(node) end
    end
  end

  function L.flush_dues()
    for queue, suffixes in pairs(L.dues_changed) do
      for suffix in pairs(suffixes) do change(P .. 'd:' .. queue, suffix, L.dues[queue][suffix]) end
      L.dues_changed[queue] = nil
    end
    write_changes()
  end

  local function flush_hash(key)
    local values, set, n, gone = L.fields[key], {}, 0, {}
    for field in pairs(L.written[key]) do
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
    L.written[key] = {}
  end

  -- flush_count writes how many wait. A line without tickets has no keys.
  local function flush_count()
    if L.count <= 0 then
      local keys = {P .. 'q', P .. 't', P .. 'f', P .. 'u', P .. 'z'}
      for name in pairs(L.queues) do keys[#keys + 1] = P .. 'd:' .. name end
      redis.call('DEL', unpack(keys))
    elseif L.count ~= L.before then
      redis.call('SET', P .. 'q', format('%d', L.count), 'EX', L.ttl)
    end
    L.before = L.count
  end

  function L.flush()
    L.flush_added()
    L.flush_places()
    flush_flows()
    flush_nodes()
    L.flush_dues()
    local own = L.own
    local renew = L.count > 0 and own.hour ~= hour
    if own.changed or renew then
      own.hour, own.changed, own.renew = hour, false, renew or own.renew
      L.write('u', 'line', format('%d %d %d %s', own.rank, own.front, own.limits_at, hour))
    end
    for key, changed in pairs(L.written) do
      if next(changed) then flush_hash(key) end
    end
    flush_count()
    if renew and L.count > 0 then
      expire(P .. 't', L.ttl)
      expire(P .. 'f', L.ttl)
      expire(P .. 'u', L.ttl)
    end
  end

  -- The queues' records come last: they hold the appointments, which are made in the end.
  function L.finish()
    if not L.queues then return end
    L.flush()
    if L.count <= 0 then return end
    local list, gone = {}, {}
    for name, q in pairs(L.queues) do
      if q.n == 0 and call.now - q.asked >= q.lasts then
        gone[#gone + 1] = name
        redis.call('DEL', P .. 'd:' .. name)
      elseif q.changed then
        list[#list + 1] = name
        list[#list + 1] = format('%d %d %d %d %d %s %d %d %d %d %s', q.asked, q.n, q.weights, q.first,
          q.last, q.with == '=' .. name and '-' or q.with, q.since, q.taken, q.flows, q.priority,
          q.look)
      end
    end
    call_in_parts('HSET', P .. 'z', list)
    call_in_parts('HDEL', P .. 'z', gone)
    if L.own.renew then expire(P .. 'z', L.ttl) end
  end
end
