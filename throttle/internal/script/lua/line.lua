-- line.lua: the waiting line of a policy, as it is kept.
--
-- docs/explanation/line.md says what flows, nodes and tags are. At a node of several tenants flows
-- wait by tag (line_fair.lua), at a tenant's own by the rank of their first ticket. The node that all
-- share is ROOT. Nodes, tags and V belong to one queue. Windows are counted for all queues together.
--
-- A queue whose name begins with "!" holds the claims of one process, which alone takes them. Names of
-- other queues are escaped, and hold no "!". Live tickets have the name of their queue, those of
-- batches have "!" behind it: what is said of a QUEUE here is kept for each. A ticket is "QUEUE/ID" in
-- both, and its VALUES begin with the "!".
--
-- Keys, behind the prefix P of the policy. A SUFFIX is a scope's key behind P, a NODE is
-- "QUEUE|SUFFIX".
--   q          "tickets rank": how many tickets are in the line; the last rank given, from the middle
--              of all. No key, no line
--   l          "time limits": by which limits takes looked at the line, since that time; "-" if they differed
--   t          hash: ticket "QUEUE/ID" -> "RANKcosts |VALUES key"
--                RANK       of 16 digits
--                costs      empty for "requests=1"
--                key        with "+N" behind it if window N delayed it for longest when it joined
--   f          hash: flow "QUEUE|VALUES" ->
--              "tickets units weight tag suffix rank tenant suffixes;own"
--                units      "requests=1" if all tickets cost that, else those of line_units.lua
--                weight     in thousandths
--                tag        its tenant's at ROOT
--                suffix     the node where it waits, and
--                rank       that of its first ticket there; both are "-" if it waits nowhere
--                suffixes   its scopes, narrow to broad, by "+"
--                own        the tenant's own parameters (windows.lua)
--   f:FLOW     sorted set: the tickets of a flow by rank
--   n:NODE     sorted set: the flows that wait at a node, by tag or rank, as members "RANK FLOW":
--              flows of equal tags go by the rank of their first ticket
--   d:QUEUE    sorted set: suffixes of nodes by the time at which their first flow may fit (us)
--   g:NODE     sorted set: tenants by their tag, where it is above V and no flow has it
--   u          hash: NODE -> "tickets V units", of nodes but ROOT
--   z          hash: queue -> "asked tickets weights first last server since taken flows priority rescan V
--              units", with what is counted at its ROOT
--                asked      when a server asked for it last
--                weights    of its flows together; and how many flows
--                first      the first appointment of servers that will ask, and the last one
--                server     the least name of the queues that are asked for together
--                since      since when slots are what tickets wait for, 0 if they do not; and how many
--                           were taken since (line_appointments.lua)
--                priority   of asynq.Config
--                rescan     how far all nodes were looked at again after limits changed, or "-"
--   s:SUFFIX   string: the order of queues and classes at a scope (line_order.lua)
--   k          sorted set: processes by the time of a take that they have not acknowledged
--   k:PROCESS  string: what the process took last
-- A line without tickets has no keys. Else they have a TTL of 400 days since they last changed: a ticket may wait
-- as long as its task. k:PROCESS without tickets has one of a minute, s:SUFFIX that of its windows.
--
-- new_line(call) -> L. What is read of a line is read once. What changes is noted, and written in the
-- end (line_write.lua). Only calls that find a line, or join one, make it. The other files each have a
-- function that makes a table of functions, which `once` calls when one of these is needed.
--
-- call.numbers are the numbers of scopes by their attributes, call.only_tenants says whether no
-- attribute but the tenant counts, or did for those that wait. Where batches wait or join, call.batches
-- is true. In a take of several sides, L.order is the table of line_order.lua.

local function new_line(call)
  local P, now = call.P, call.now
  call.numbers, call.only_tenants = {}, true
  for number, of in ipairs(call.scopes) do
    call.numbers[of.attributes] = number
    if of.attributes ~= '' and of.attributes ~= 'tenant' then call.only_tenants = false end
  end
  -- Nodes that tickets joined by other scopes are counted until the line is empty.
  if call.only_tenants and call.waiting and redis.call('EXISTS', P .. 'u') == 1 then call.only_tenants = false end
  local fields, written = {t = {}, f = {}, u = {}, z = {}}, {t = {}, f = {}, u = {}, z = {}}
  local nodes, flows = {}, {}
  local count, rank = match(call.waiting or '0 0', '^(%d+) (%d+)$')
  count = count + 0
  -- With the functions below 32 fields: one more makes the table twice as large.
  local L = {
    call = call, ttl = '34560000', order = false, rank = rank + 0,
    tickets = count, stored = count,    -- now, and in Redis
    fields = fields, written = written, -- of the hashes
    nodes = nodes, flows = flows, queues = {},
    limits = ARGV[4],                   -- the policy: calls by other limits differ in it
    read = false, read_all = false, write = false,
  }

  -- read_all reads fields of the hashes t, f or u that will be asked for, in one command.
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

  -- write sets a field, or deletes it by false, in the end.
  function L.write(key, field, value)
    fields[key][field], written[key][field] = value, value
  end

  local function new_queue(name, record)
    local claims, batch = byte(name) == 33 and #name > 1, byte(name, -1) == 33
    if batch then call.batches = true end
    local asked, n, weights, first, last, server, since, taken, count, priority, rescan, v, units = match(
      record, '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S*) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+)$')
    local q = { -- 32 fields with those of line_take.lua, as one more makes the table twice as large
      claims = claims, batch = batch, asked = asked + 0, weights = weights + 0, flows = count + 0,
      first = first + 0, last = last + 0, server = server, since = since + 0, taken = taken + 0,
      priority = priority + 0, rescan = rescan,
      dues = {}, dues_key = 'd:' .. name, -- when nodes are due, by suffix (line_places.lua)
      key = name .. '|' .. ROOT, queue = name, suffix = ROOT,
      number = call.numbers[''], shared = true,
      n = n + 0, same = false, units = false, v = v + 0, tags = {}, changed = false, moved = false,
    }
    q.nodes = {q}
    line_units.parse(call, q, units)
    L.queues[name] = q
    return q
  end

  -- alive tells whether a queue may hold up others.
  function L.alive(q) return q.n > 0 and appointments.kept(q, now) end

  -- queue_of returns the record of a queue, which is its ROOT, too.
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
      v = 0, tags = {}, changed = false, moved = false, list = nil, more = nil,
      shared = not find(',' .. attributes .. ',', ',tenant,', 1, true),
    }
    nodes[key] = node
    local record = not call.only_tenants and L.read('u', key) -- else flows count what waits there
    if record then
      local n, v, units = match(record, '^(%d+) (%d+) (%S+)$')
      node.n, node.v = n + 0, v + 0
      line_units.parse(call, node, units)
    end
    return node
  end

  -- nodes_of returns the nodes that count a flow's tickets, ROOT last. Where only tenants count, the
  -- flow's own record counts what waits at the tenant's scope.
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

  -- tickets_at returns the node, or the flow, that counts what waits of a queue at a scope of a flow; nil if
  -- nothing does.
  function L.tickets_at(name, scope, flow)
    if not (call.only_tenants and scope.of.of_tenant) then return L.node_of(name, scope.suffix) end
    return name == flow.queue and flow or L.flow_of(name .. flow.values)
  end

  function L.new_flow(id, weight, tenant, suffixes, own_text)
    local queue, list, n = match(id, '^([^|]*)'), {nil, nil}, 0
    for suffix in gmatch(suffixes, '[^+]+') do
      n = n + 1
      list[n] = suffix
    end
    return { -- 32 fields, as one more makes the table twice as large
      id = id, queue = queue, values = sub(id, #queue + 1), batch = byte(queue, -1) == 33,
      n = 0, same = false, units = false, -- line_units.lua
      weight = weight, tag = 0, tenant = tenant, suffixes_text = suffixes, suffixes = list,
      own_text = own_text, own = windows.own_parameters(call, own_text),
      changed = false, suffix = nil, rank = nil, score = nil, opened = false,
      stored_suffix = nil, stored_rank = nil, stored_score = nil,
      heads = nil, head = 1, popped = 0, -- the first tickets, and how many of them were taken
      first = nil,                       -- the first one that is left
      scopes = nil, nodes = nil, foreign = nil,
      aligned = nil,                     -- call.reloads when its scopes stood at one time
    }
  end

  -- count counts a ticket of a flow (1), or does not any more (-1).
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
    local n, units, weight, tag, suffix, rank, tenant, suffixes, own =
      match(record, '^(%d+) (%S+) (%d+) (%d+) (%S+) (%S+) (%S+) ([^ ;]+);(.*)$')
    flow = L.new_flow(id, weight + 0, tenant, suffixes, own)
    flow.n, flow.tag = n + 0, tag + 0
    line_units.parse(call, flow, units)
    if suffix ~= '-' then
      flow.suffix, flow.rank, flow.stored_suffix, flow.stored_rank = suffix, rank, suffix, rank
    end
    flows[id] = flow
    return flow
  end

  -- ticket returns the values, costs and rank of a ticket of this record, or of the line; nil without one.
  function L.ticket(id, record)
    record = record or L.read('t', id)
    if not record then return nil end
    local rank, costs, values = match(record, '^(................)(%S*) (%S*)')
    if costs == '' then costs = 'requests=1' end
    return values, costs, rank, record
  end

  -- flow_name returns the name of a ticket's flow.
  function L.flow_name(id)
    local values = L.ticket(id)
    return values and match(id, '^[^/]*') .. values
  end

  add_writing(L)
  local all = L.stored > 0 and redis.call('HGETALL', P .. 'z') or {}
  for i = 1, #all, 2 do new_queue(all[i], all[i + 1]) end
  return L
end
