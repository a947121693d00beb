-- line.lua: the waiting line of a policy, as Redis keeps it.
--
-- docs/explanation/line.md explains flows, nodes and tags. At a node of several tenants flows
-- wait by tag (line_fair.lua), at a tenant's own by the rank of their first ticket. The node that all
-- share is ROOT. Nodes, tags and V belong to one queue. Windows are counted for all queues together.
--
-- A queue whose name begins with "!" has the claims of one process, which alone takes them. Names of other queues are
-- escaped, and contain no "!". In keys QUEUE is a side: for live tickets the name of a queue, for batches the name
-- and "!". Names of tickets, "QUEUE/ID", lack that "!": the record of a batch's ticket has it before the "|".
--
-- Keys, after the prefix P of the policy. A SUFFIX is a scope's key without P, a NODE is "QUEUE|SUFFIX".
--   q          "tickets rank": how many tickets are in the line, and the last rank given, less ZERO or
--              FRONT of line_join.lua. Without the key there is no line
--   l          "time limits": `limits` is the policy's text, by which all takes since `time` have looked at the
--              line; "-" if the texts of takes differed, or after a Reset
--   t          hash: ticket "QUEUE/ID" -> "RANKcosts [!]|VALUES key"
--                RANK       of 16 digits
--                costs      empty for "requests=1"
--                key        tells tasks of one ID apart; then ":SINCE" if given, "+N" if window N delayed it longest
--   f          hash: flow "QUEUE|VALUES" -> "tickets units weight tag suffix rank tenant suffixes;settings"
--                units      the text of line_units.lua; weight: in thousandths
--                tag        of its tenant at ROOT, if no window counts by other attributes; else 0
--                suffix     of the node where it waits, "-" if nowhere; rank: of its first ticket there
--                suffixes   of its scopes, narrow to broad, joined by "+"; settings: the tenant's own (windows.lua)
--   f:FLOW     sorted set: the tickets of a flow by rank
--   n:NODE     sorted set: the flows that wait at a node, by tag or rank, as members "RANK FLOW":
--              RANK, of its first ticket, is the order of flows with equal tags
--   m:NODE     sorted set: "TENANT RANK FLOW" of all flows, if n:NODE has the first one of each tenant only: at a
--              node of several tenants, if attributes count besides the tenant
--   d:QUEUE    sorted set: suffixes of nodes by the time at which their first flow may fit (us)
--   g:NODE     sorted set: tenants by their tag, if it is above V and not in the record of a flow
--   u          hash: NODE -> "tickets V units", of nodes but ROOT
--   z          hash: queue -> "asked tickets weights first last server since taken flows priority rescan V
--              units", with what is counted at its ROOT
--                asked      when a server asked for it last, or its record began
--                weights    the sum of its flows' weights; `flows` is their number
--                first      the first appointment of servers that will ask; `last` is the last one
--                server     the least name of the queues that are, or once were, asked for together
--                since      since when tickets wait for slots, else 0; `taken`: tickets taken since then
--                priority   of asynq.Config
--                rescan     the cursor of the scan that makes nodes due after limits changed; "-": it is done
--   s:SUFFIX   string: the order of queues and classes at a scope (line_order.lua)
--   k          sorted set: processes by the time of a take that they have not acknowledged
--   k:PROCESS  string: the last take of the process
-- A line without tickets has no keys but k, k:PROCESS and s:SUFFIX. Keys expire 400 days after their last change, as
-- a ticket may wait as long as its task; k:PROCESS if empty or of claims after a minute, s:SUFFIX with its windows.
--
-- new_line(call) -> L. It reads each field of a hash at most once. Changes are noted, and written at the end
-- (add_writing). Only calls that find a line, join one, or put taken tickets back make L. line_units and appointments
-- are tables; each other file has a new_...(L), mostly called by `made_once`, that returns a function or a table of
-- them.
--
-- call.numbers has the numbers of scopes by their attributes. call.only_tenants is true if no window counts by another
-- attribute than the tenant, in this call or in one that wrote the line. call.batches is true if batches have
-- a record, or join. In a take, if batches or several queues have a record, L.order is the table of line_order.lua.

-- add_writing adds the functions by which a call notes changes, and writes them at its end: keys are written seldom.
local function add_writing(L)
  -- send writes the scores of a sorted set by member, or the values of a hash by field. A value of false deletes.
  local function send(key, values, sorted)
    local set, n, gone = {nil, nil, nil, nil}, 0, nil
    for name, value in pairs(values) do
      if not value then
        gone = gone or {}
        gone[#gone + 1] = name
      else
        set[n + 1], set[n + 2] = sorted and value or name, sorted and name or value -- numbers arrive exactly
        n = n + 2
      end
    end
    for i = 1, n, 4000 do redis.call(sorted and 'ZADD' or 'HSET', key, unpack(set, i, min(n, i + 3999))) end
    for i = 1, gone and #gone or 0, 4000 do
      redis.call(sorted and 'ZREM' or 'HDEL', key, unpack(gone, i, min(#gone, i + 3999)))
    end
    redis.call('EXPIRE', key, L.ttl)
  end

  local call = L.call
  local P, now = call.P, call.now
  local changes = {} -- of sorted sets: scores by member, by key
  local moved = {}   -- flows, by name
  local crowds = {}  -- by node: {members: changes of m:NODE, tenants: whose first flow may have changed}

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
  -- stand in m:NODE, with the score 0. This one leaves n:NODE, into which flush then puts the tenant's first.
  local function note_score(flow, suffix, rank, score)
    local key, member = flow.queue .. '|' .. suffix, rank .. ' ' .. flow.id
    local node = not call.only_tenants and L.node_of(flow.queue, suffix)
    if node and node.shared then
      local crowd = crowds[node] or {members = {}, tenants = {}}
      crowds[node], crowd.tenants[flow.tenant] = crowd, true
      crowd.members[flow.tenant .. ' ' .. member] = score and 0
      score = false
    end
    L.change('n:' .. key, member, score)
  end

  -- put_first puts the first flow of a tenant in m:NODE into n:NODE, and removes the second one, if it stands there.
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
    if found[2] then L.change('n:' .. node.key, sub(found[2], #tenant + 2), false) end
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

  -- count_flows returns a lower bound of the flows at a node, as of the last flush. If m:NODE has all, n:NODE has only
  -- the first one of each tenant. But flows that calls with only_tenants have put into n:NODE are not in m:NODE.
  function L.count_flows(key)
    local n = redis.call('ZCARD', P .. 'n:' .. key)
    return (n == 0 or call.only_tenants) and n or max(n, redis.call('ZCARD', P .. 'm:' .. key))
  end

  local function write_flows()
    for id, flow in pairs(L.flows) do
      if flow.popped > 0 then
        redis.call('ZREMRANGEBYRANK', P .. 'f:' .. id, '0', format('%d', flow.popped - 1))
        redis.call('EXPIRE', P .. 'f:' .. id, L.ttl)
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

  -- finish removes claims of ended processes, and writes all changes. Without tickets few keys stay: see above.
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
    redis.call('EXPIRE', P .. 'l', L.ttl)
    redis.call('SET', P .. 'q', format('%d %d', L.tickets, L.rank), 'EX', L.ttl)
  end
end

local function new_line(call)
  local P, now = call.P, call.now
  call.numbers, call.only_tenants = {}, true
  for number, spec in ipairs(call.scopes) do
    call.numbers[spec.attributes] = number
    if spec.attributes ~= '' and spec.attributes ~= 'tenant' then call.only_tenants = false end
  end
  local fields, written = {t = {}, f = {}, u = {}, z = {}}, {t = {}, f = {}, u = {}, z = {}}
  local nodes, flows = {}, {}
  local tickets, rank = match(call.waiting or '0 0', '^(%d+) (%d+)$')
  -- At most 32 fields with the functions below: more make the table twice as large.
  local L = {
    call = call, ttl = '34560000', order = false, rank = rank + 0,
    tickets = tickets + 0, stored = tickets + 0, -- now, and in Redis
    fields = fields, written = written, -- of the hashes
    nodes = nodes, flows = flows, queues = {},
    limits = ARGV[4],                   -- the text of the policy, which differs if the limits do
    read = false, read_all = false, write = false,
  }

  -- read_all reads fields of one of the hashes t, f and u ahead, by one command.
  function L.read_all(key, names)
    local known, unread, n = fields[key], {}, 0
    for i = 1, #names do
      if known[names[i]] == nil then
        n = n + 1
        known[names[i]], unread[n] = false, names[i]
      end
    end
    if n == 0 or L.stored == 0 then return end
    local found = redis.call('HMGET', P .. key, unpack(unread))
    for i = 1, n do known[unread[i]] = found[i] end
  end

  -- read returns a field, or false.
  function L.read(key, field)
    if fields[key][field] == nil then L.read_all(key, {field}) end
    return fields[key][field]
  end

  -- write notes the new value of a field; false deletes it.
  function L.write(key, field, value)
    fields[key][field], written[key][field] = value, value
  end

  local function new_queue(name, record)
    local claims, batch = byte(name) == 33 and #name > 1, byte(name, -1) == 33 -- "!"; "!" itself: batches of queue ""
    if batch then call.batches = true end
    local asked, n, weights, first, last, server, since, taken, n_flows, priority, rescan, v, units = match(
      record, '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S*) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+)$')
    local q = { -- at most 32 fields with those of line_fair.lua, as more make the table twice as large
      claims = claims, batch = batch, asked = asked + 0, weights = weights + 0, flows = n_flows + 0,
      first = first + 0, last = last + 0, server = server, since = since + 0, taken = taken + 0,
      priority = priority + 0, rescan = rescan,
      dues = {}, dues_key = 'd:' .. name, -- when nodes are due, by suffix (line_heads.lua)
      key = name .. '|' .. ROOT, queue = name, suffix = ROOT,
      number = call.numbers[''], shared = true,
      n = n + 0, same = false, units = false, v = v + 0, tags = {}, changed = false, moved = false,
    }
    q.nodes = {q}
    line_units.parse(call, q, units)
    L.queues[name] = q
    return q
  end

  -- alive returns whether a queue may delay others.
  function L.alive(q) return q.n > 0 and appointments.served(q, now) end

  -- queue_of returns the record of a queue, which is also its node ROOT.
  function L.queue_of(name)
    return L.queues[name] or new_queue(name, format('%d 0 0 0 0 %s 0 0 0 1 - 0 -', now, name))
  end

  function L.node_of(queue, suffix)
    if suffix == ROOT then return L.queue_of(queue) end
    local key = queue .. '|' .. suffix
    local node = nodes[key]
    if node then return node end
    local attributes = match(suffix, '^w:([^:]*)')
    node = {
      key = key, queue = queue, suffix = suffix, number = call.numbers[attributes],
      n = 0, same = false, units = false, -- line_units.lua
      v = 0, tags = {}, changed = false, moved = false, list = nil, crowded = nil,
      shared = not find(',' .. attributes .. ',', ',tenant,', 1, true),
    }
    nodes[key] = node
    local record = not call.only_tenants and L.read('u', key) -- else flows keep the tally
    if record then
      local n, v, units = match(record, '^(%d+) (%S+) (%S+)$')
      node.n, node.v = n + 0, v + 0
      line_units.parse(call, node, units)
    end
    return node
  end

  -- nodes_of returns the nodes that count a flow's tickets, ROOT last. With only_tenants the flow counts its own.
  function L.nodes_of(flow)
    local q = L.queue_of(flow.queue)
    if call.only_tenants then return q.nodes end
    if not flow.nodes then
      flow.nodes = {}
      for i, suffix in ipairs(flow.suffixes) do
        if suffix ~= ROOT then flow.nodes[i] = L.node_of(flow.queue, suffix) end
      end
      flow.nodes[#flow.nodes + 1] = q
    end
    return flow.nodes
  end

  -- tickets_at returns the tally of a queue's tickets at a scope of a flow: a node, a flow, or nil if there is none.
  function L.tickets_at(name, scope, flow)
    if not (call.only_tenants and scope.spec.of_tenant) then return L.node_of(name, scope.suffix) end
    return name == flow.queue and flow or L.flow_of(name .. flow.values)
  end

  function L.new_flow(id, weight, tenant, suffixes, settings_text)
    local queue, list, n = match(id, '^([^|]*)'), {nil, nil}, 0
    for suffix in gmatch(suffixes, '[^+]+') do
      n = n + 1
      list[n] = suffix
    end
    return { -- at most 32 fields, as more make the table twice as large
      id = id, queue = queue, values = sub(id, #queue + 1), batch = byte(queue, -1) == 33,
      n = 0, same = false, units = false, -- line_units.lua
      weight = weight, tag = 0, tenant = tenant, suffixes_text = suffixes, suffixes = list,
      settings_text = settings_text, settings = windows.settings_of(call, settings_text),
      changed = false, suffix = nil, rank = nil, score = nil, passed = false,
      stored_suffix = nil, stored_rank = nil,
      heads = nil, head = 1, popped = 0, -- tickets read, the first one left of these, how many of f:ID are gone
      first = nil,                       -- the first one that is left, with its costs
      scopes = nil, nodes = nil, foreign = nil,
      generation = nil,                  -- call.generation when its scopes were aligned
    }
  end

  -- count adds a ticket of a flow to all tallies (1), or removes it (-1).
  function L.count(flow, costs, sign)
    L.tickets = L.tickets + sign
    line_units.count(flow, costs, sign)
    local list = L.nodes_of(flow)
    for i = 1, #list do line_units.count(list[i], costs, sign) end
  end

  function L.flow_of(id)
    local flow = flows[id]
    if flow then return flow end
    local record = L.read('f', id)
    if not record then return nil end
    local n, units, weight, tag, suffix, rank, tenant, suffixes, settings =
      match(record, '^(%d+) (%S+) (%d+) (%S+) (%S+) (%S+) (%S+) ([^ ;]+);(.*)$')
    flow = L.new_flow(id, weight + 0, tenant, suffixes, settings)
    flow.n, flow.tag = n + 0, tag + 0
    line_units.parse(call, flow, units)
    if suffix ~= '-' then
      flow.suffix, flow.rank, flow.stored_suffix, flow.stored_rank = suffix, rank, suffix, rank
    end
    flows[id] = flow
    return flow
  end

  -- ticket returns a ticket's values, costs, rank and record; nil if it does not wait. A caller may pass the record.
  function L.ticket(id, record)
    record = record or L.read('t', id)
    if not record then return nil end
    local rank, costs, values = match(record, '^(................)(%S*) (%S*)')
    if costs == '' then costs = 'requests=1' end
    return values, costs, rank, record
  end

  function L.flow_name(id)
    local values = L.ticket(id)
    return values and match(id, '^[^/]*') .. values
  end

  add_writing(L)
  local all = L.stored > 0 and redis.call('HGETALL', P .. 'z') or {}
  local keys = {P .. 'u'}
  for i = 1, #all, 2 do keys[#keys + 1] = P .. 'm:' .. new_queue(all[i], all[i + 1]).key end
  -- u or m:ROOT exists if a call put flows there whose policy has windows by other attributes.
  if call.only_tenants and call.waiting and redis.call('EXISTS', unpack(keys)) > 0 then call.only_tenants = false end
  return L
end
