-- line.lua: the waiting line of a policy, as it is kept.
--
-- A ticket waits. The tickets of one tenant, attributes and queue form a flow, first come, first
-- served. A flow waits at one node, the narrowest scope value that has no room for its first
-- ticket. If all have room it waits at the one that all share (ROOT), for a handler slot. At a node
-- of several tenants flows wait by tag (line_fair.lua), at a tenant's own by the rank of their
-- first ticket. Nodes, tags and V belong to one queue. Windows are counted for all queues together.
--
-- A queue whose name begins with "!" holds the claims of one process: tickets of calls that wait in
-- place. Only this process takes them. Names of other queues are escaped and hold no "!".
--
-- A queue has two classes of tickets. What is said of a QUEUE here is kept for each: its live ones
-- have the queue's name, those of batches have "!" behind it. A ticket is "QUEUE/ID" in both, and
-- its VALUES begin with the "!". line_order.lua says who goes first.
--
-- Keys, behind the prefix P of the policy. A SUFFIX is a scope's key behind P, a NODE is
-- "QUEUE|SUFFIX".
--   q          how many tickets are in the line; no key, no line
--   t          hash: ticket "QUEUE/ID" -> "RANKcosts |VALUES key"
--                RANK       of 16 digits
--                costs      empty for "requests=1"
--   f          hash: flow "QUEUE|VALUES" ->
--              "tickets units hour weight tag suffix rank tenant suffixes;own"
--                units      "requests=1" if all tickets cost that, else those of line_units.lua
--                hour       when the keys of the flow were renewed
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
--   u          hash: "n NODE" -> "tickets V units";
--              "line" -> "rank front limits_at hour": the last ranks given at the end and in front,
--              when nodes were looked at with the limits of "limits", when keys were renewed;
--              "limits" -> the windows of the last take
--   z          hash: queue -> "asked tickets weights first last with since taken flows priority look"
--                asked      when a server asked for it last
--                weights    of its flows together; and how many flows
--                first      the first appointment of servers that will ask, and the last one
--                with       the least name of the queues that are asked for together; "-" if alone
--                since      since when slots are what tickets wait for, 0 if they do not; and how many
--                           were taken since (line_appointments.lua)
--                priority   of asynq.Config
--                look       how far all nodes were looked at again after limits changed, or "-"
--   s:SUFFIX   string: the order of queues and classes at a scope (line_order.lua)
--   k          sorted set: processes by the time of a take that they have not acknowledged
--   k:PROCESS  string: what the process took last
-- A key has a TTL of a day, or of two periods of the longest window if that is more, and is renewed
-- while it is used. k:PROCESS without tickets has one of a minute, s:SUFFIX that of its windows.
--
-- new_line(call) -> L, the line as line_join.lua and line_take.lua see it. What they read is read
-- once, what they change is written in the end. Only calls that find a line, or join one, make it.
-- Besides what line_write.lua adds, L has:
--   read(key, field) -> value          a field of the hashes t, f or u, or false
--   read_all(key, names)               reads fields that will be asked for, in one command
--   write(key, field, value)           sets a field, or deletes it by false, in the end
--   read_line()                        reads the queues, and the line's own numbers
--   queue_of(name) -> q                the record of a queue, a new one if there is none
--   alive(q)                           whether it may hold up other queues: a server asks for it
--   node_of(queue, suffix) -> node     new_flow(id, weight, tenant, suffixes, own_text) -> flow
--   flow_of(id) -> flow, or false
--   brief_flow(id) -> flow, or false   the flow with what most joins need of it: id, queue, values,
--                                      n, same, units, hour, weight and tag
--   ticket(id) -> flow's id, costs, key, rank; nil if it is not in line
--
-- Where batches wait or join, call.batches is true. In a take of several sides, L.order is the table of
-- line_order.lua.
-- What line_fair.lua and line_places.lua add is set up when it is first asked for: few joins need it.

local function new_line(call)
  local P, now = call.P, call.now
  local fields, written = {t = {}, f = {}, u = {}}, {t = {}, f = {}, u = {}}
  local nodes, flows = {}, {}
  -- Most fields are named here, as a table that grows is copied. These are 32: one more makes the
  -- table twice as large.
  local L = {
    call = call, hour = format('%d', now / 3600000000), ttl = DAY, order = false,
    count = call.waiting, before = call.waiting, -- tickets now, and in Redis
    fields = fields, written = written,          -- of the hashes
    nodes = nodes, flows = flows, queues = false,
    own = false,                                 -- the field "line", and what is to be done
    numbers = {},                                -- scopes by their attributes
    dues = {}, dues_changed = {},                -- by queue and suffix
    added = {},                                  -- tickets that joined, by flow
    waiting = {},                                -- sums of line_eta.lua
    read = false, read_all = false, write = false, read_line = false, queue_of = false,
    alive = false, node_of = false, new_flow = false, flow_of = false, brief_flow = false,
    ticket = false, flush_added = false, flush_places = false, flush_dues = false, flush = false,
    finish = false,
  }
  for i = 1, #call.scopes do L.numbers[call.scopes[i].attributes] = i end
  local ttl = DAY
  for i = 1, #call.windows do
    local longest = call.windows[i].algorithm.longest
    if longest then ttl = max(ttl, longest(call.windows[i])) end
  end
  L.ttl = format('%d', ttl)

  function L.read(key, field)
    local value = fields[key][field]
    if value == nil then
      value = L.before > 0 and redis.call('HGET', P .. key, field)
      fields[key][field] = value
    end
    return value
  end

  function L.read_all(key, names)
    local known, unread, n = fields[key], {}, 0
    for i = 1, #names do
      if known[names[i]] == nil then
        n = n + 1
        unread[n] = names[i]
      end
    end
    if n == 0 then return end
    if L.before == 0 then
      for i = 1, n do known[unread[i]] = false end
      return
    end
    for from = 1, n, 4000 do -- values in one call to Redis
      local found = redis.call('HMGET', P .. key, unpack(unread, from, min(n, from + 3999)))
      for i = 1, #found do known[unread[from + i - 1]] = found[i] end
    end
  end

  function L.write(key, field, value)
    fields[key][field] = value
    written[key][field] = true
  end

  -- new_queue returns the record of a queue.
  local function new_queue(name, asked, n, weights, first, last, with, since, taken, of, priority, look)
    local claims, batch = byte(name) == 33 and #name > 1, byte(name, -1) == 33
    if batch then call.batches = true end
    return {
      name = name, claims = claims, asked = asked, n = n, weights = weights, first = first,
      last = last, with = with == '-' and '=' .. name or with, changed = false, since = since,
      taken = taken, priority = priority, look = look,
      lasts = claims and 2000000 or 60000000, -- us after which one that is not asked for is dead
      batch = batch, flows = of,
    }
  end

  function L.read_line()
    if L.queues then return end
    L.queues = {}
    local text = L.read('u', 'line') or '0 0 0 -'
    local rank, front, limits_at, hour = match(text, '^(%S+) (%S+) (%S+) (%S+)$')
    L.own = {
      rank = rank + 0, front = front + 0, limits_at = limits_at + 0, hour = hour, changed = false,
      renew = false, dead_claims = false,
    }
    if L.before == 0 then return end
    local all = redis.call('HGETALL', P .. 'z')
    for i = 1, #all, 2 do
      local asked, n, weights, first, last, with, since, taken, of, priority, look = match(all[i + 1],
        '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+)$')
      local q = new_queue(all[i], asked + 0, n + 0, weights + 0, first + 0, last + 0, with,
        since + 0, taken + 0, of + 0, priority + 0, look)
      L.queues[q.name] = q
      if q.claims and q.n > 0 and not L.alive(q) then L.own.dead_claims = true end
    end
  end

  function L.queue_of(name)
    local q = L.queues[name]
    if not q then
      q = new_queue(name, now, 0, 0, 0, 0, '-', 0, 0, 0, 1, '-')
      L.queues[name] = q
    end
    return q
  end

  function L.alive(q) return q.n > 0 and now - q.asked < q.lasts end

  function L.node_of(queue, suffix)
    local name = queue .. '|' .. suffix
    local node = nodes[name]
    if node then return node end
    local attributes = match(suffix, '^w:([^:]*)')
    node = {
      name = name, queue = queue, suffix = suffix, number = L.numbers[attributes],
      n = 0, same = false, units = false, -- line_units.lua
      v = 0, tags = nil, changed = false, moved = false, list = nil, more = nil,
      shared = attributes == '' or not find(',' .. attributes .. ',', ',tenant,', 1, true),
    }
    nodes[name] = node
    local record = L.read('u', 'n ' .. name)
    if record then
      local n, v, units = match(record, '^(%d+) (%d+) (%S+)$')
      node.n, node.v = n + 0, v + 0
      line_units.parse(call, node, units)
    end
    return node
  end

  function L.new_flow(id, weight, tenant, suffixes, list, own_text)
    local queue = match(id, '^([^|]*)')
    return {
      id = id, queue = queue, values = sub(id, #queue + 1), weight = weight, tag = 0, hour = nil,
      batch = byte(queue, -1) == 33,
      n = 0, same = false, units = false, -- line_units.lua
      rest = nil,                         -- of its record, if that was not read to the end
      tenant = tenant, suffixes = suffixes, list = list, own_text = own_text,
      own = windows.own_parameters(call, own_text),
      changed = false, suffix = nil, rank = nil, score = nil, opened = false,
      stored_suffix = nil, stored_rank = nil, stored_score = nil,
      heads = nil, head = 1, popped = 0, -- the first tickets, and how many of them were taken
      first = nil,                       -- the first one that is left
      scopes = nil, nodes = nil, gone = nil, static = nil, between = nil, foreign = nil,
    }
  end

  function L.brief_flow(id)
    local flow = flows[id]
    if flow ~= nil then return flow end
    local record = L.read('f', id)
    if not record then
      flows[id] = false
      return false
    end
    local n, units, hour, weight, tag, rest = match(record, '^(%d+) (%S+) (%S+) (%d+) (%d+) (.*)$')
    local queue = match(id, '^([^|]*)')
    flow = {
      id = id, queue = queue, values = sub(id, #queue + 1), weight = weight + 0, tag = tag + 0,
      hour = hour, n = n + 0, same = false, units = false, rest = rest, changed = false, popped = 0,
      batch = byte(queue, -1) == 33,
    }
    line_units.parse(call, flow, units)
    flows[id] = flow
    return flow
  end

  -- A flow that is known in brief is completed. Others are read at once, as a table that grows is
  -- copied.
  function L.flow_of(id)
    local flow = flows[id]
    if flow == false or flow and not flow.rest then return flow end
    local record = flow and flow.rest or L.read('f', id)
    if not record then
      flows[id] = false
      return false
    end
    local suffix, rank, tenant, list, own, n, units, hour, weight, tag
    if flow then
      suffix, rank, tenant, list, own = match(record, '^(%S+) (%S+) (%S+) ([^ ;]+);(.*)$')
    else
      n, units, hour, weight, tag, suffix, rank, tenant, list, own =
        match(record, '^(%d+) (%S+) (%S+) (%d+) (%d+) (%S+) (%S+) (%S+) ([^ ;]+);(.*)$')
    end
    local suffixes, count = {nil, nil}, 0
    for s in gmatch(list, '[^+]+') do
      count = count + 1
      suffixes[count] = s
    end
    if flow then
      flow.rest, flow.tenant, flow.suffixes, flow.list, flow.head = nil, tenant, suffixes, list, 1
      flow.own_text, flow.own = own, windows.own_parameters(call, own)
    else
      flow = L.new_flow(id, weight + 0, tenant, suffixes, list, own)
      flow.n, flow.hour, flow.tag = n + 0, hour, tag + 0
      line_units.parse(call, flow, units)
      flows[id] = flow
    end
    if suffix ~= '-' then
      flow.suffix, flow.rank, flow.stored_suffix, flow.stored_rank = suffix, rank, suffix, rank
    end
    return flow
  end

  function L.ticket(id)
    local record = L.read('t', id)
    if not record then return nil end
    local costs, values, key = match(record, '^(%S*) (%S*) (%S+)$', 17)
    if costs == '' then costs = 'requests=1' end
    return match(id, '^[^/]*') .. values, costs, key, sub(record, 1, 16)
  end

  add_writing(L)
  return setmetatable(L, {__index = function(_, name)
    setmetatable(L, nil)
    add_fairness(L)
    add_places(L)
    return L[name]
  end})
end
