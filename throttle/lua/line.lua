-- line.lua: the waiting line, for calls that find one or that have to wait.
--
-- Who waits is a ticket. Tickets that are counted by the same scope values form a flow, first
-- come, first served. A flow waits at one node, the narrowest scope value that has no room for
-- its first ticket, and moves on to the next one that has none. Flows wait at a shared node by
-- start-time fair queueing between tenants (Goyal, Vin, Cheng: "Start-time Fair Queueing", 1996),
-- at a tenant's own node by the rank of their first ticket.
--
-- A ticket that fits is *called*: its cost is held in all its nodes until it comes or the hold
-- runs out. So whoever is called gets through, and nobody else takes its room.
--
-- Keys, all behind the prefix P of the call's hash tag; a SUFFIX is a scope's key behind P:
--   q          how many tickets are in the line, and the format of the rest (windows.lua); no key, no line
--   t          hash: ticket -> "state rank calls promise flow costs"
--              state: w waits, c called, s skipped (called often and never came)
--   f          hash: flow -> "weight tenant suffixes own"; suffixes narrow to broad, by spaces
--   f:FLOW     sorted set: the waiting tickets of a flow by rank
--   a          hash: flow -> "suffix member" of the node at which it waits, and as what
--   n:SUFFIX   sorted set: the flows that wait at a node, by tag or rank, as members "RANK FLOW",
--              so that flows with equal tags go by the rank of their first ticket
--   d          sorted set: nodes by the time at which their first flow may fit (us)
--   c          sorted set: called tickets by the end of their hold, skipped ones by their next call (us)
--   u          hash: "f FLOW UNIT" and "n SUFFIX UNIT": waiting units; "c FLOW": tickets; "w": weights;
--              "v SUFFIX": virtual time; "t SUFFIX TENANT": a tenant's tag; "rank", "front";
--              "limits": those by which nodes were looked at last, and "limits at": since when
-- In a scope's value the section "/UNIT" of kind "h" holds the units of called tickets.

local P = sub(KEYS[#KEYS], 1, -2)
local SKIP = 60000000 -- us until a ticket that never came is called again
local RANK_ZERO = 4503599627370496 -- ranks before the first are negative
local STEPS = 256     -- how many flows one call looks at, at the most
local UNPACK = 4000   -- how many values go with one call to Redis; even

local ticket, flow_id, tenant, weight, own_costs, front, hold, budget, max_wait, backlog, attributes, own_params, base_params =
  string.match(ARGV[4], '^' .. string.rep('([^\n]*)\n', 12) .. '([^\n]*)')
weight, front, hold, budget, max_wait, backlog =
  tonumber(weight), front == '1', tonumber(hold), tonumber(budget), tonumber(max_wait), tonumber(backlog)

local function int(n) return string.format('%d', n) end -- '%.0f' takes twice the time
local function real_number(n) return string.format('%.17g', n) end

-- A call of the line reads a field of its hashes once, and writes what has changed in the end
-- (flush): a call to Redis costs more than the Lua around it.
local fields = {t = {}, f = {}, a = {}, u = {}} -- as far as they are known; false: not there
local changed = {}                              -- the names of those to write, by hash
local empty = not values[#KEYS]                 -- nothing is in Redis

local function read(key, field)
  local value = fields[key][field]
  if value == nil then
    value = not empty and redis.call('HGET', P .. key, field)
    fields[key][field] = value
  end
  return value
end

-- read_all reads fields that will be asked for in one call.
local function read_all(key, names)
  if empty then return end
  local known, unread, n = fields[key], {}, 0
  for _, name in ipairs(names) do
    if known[name] == nil then
      n = n + 1
      unread[n] = name
    end
  end
  for from = 1, n, UNPACK do
    local found = redis.call('HMGET', P .. key, unpack(unread, from, min(n, from + UNPACK - 1)))
    for i, value in ipairs(found) do known[unread[from + i - 1]] = value or false end
  end
end

-- write sets a field to a string, or deletes it, by false.
local function write(key, field, value)
  fields[key][field] = value
  if not changed[key] then changed[key] = {} end
  changed[key][field] = true
end

local function save_fields(key)
  local set, n, gone = {}, 0, {}
  for field in pairs(changed[key] or {}) do
    local value = fields[key][field]
    if value then
      set[n + 1], set[n + 2] = field, value
      n = n + 2
    else
      gone[#gone + 1] = field
    end
  end
  for from = 1, n, UNPACK do redis.call('HSET', P .. key, unpack(set, from, min(n, from + UNPACK - 1))) end
  for from = 1, #gone, UNPACK do redis.call('HDEL', P .. key, unpack(gone, from, min(#gone, from + UNPACK - 1))) end
  changed[key] = nil
end

local function number(field) return tonumber(read('u', field) or 0) end

-- The first of `c` and of `d`, as far as it is known: {time, member}, time 0 if there is none.
local firsts = {}
if empty then firsts.c, firsts.d = {0}, {0} end

local function first_of(key)
  local first = firsts[key]
  if not first then
    local found = redis.call('ZRANGE', P .. key, 0, 0, 'WITHSCORES')
    first = {tonumber(found[2] or '0'), found[1]}
    firsts[key] = first
  end
  return first[1], first[2]
end

local function set_time(key, member, time)
  local first = firsts[key]
  redis.call('ZADD', P .. key, int(time), member)
  if first and (first[1] == 0 or time < first[1]) then
    firsts[key] = {time, member}
  elseif first and first[2] == member then
    firsts[key] = nil -- another one may be the first
  end
end

local function remove_time(key, member)
  redis.call('ZREM', P .. key, member)
  if firsts[key] and firsts[key][2] == member then firsts[key] = nil end
end

-- "requests=1,tokens=1500" -> {requests = 1, tokens = 1500}
local costs_of = {}
local function parse_costs(s)
  local costs = costs_of[s]
  if not costs then
    costs = {}
    for unit, n in string.gmatch(s, '([^=,]+)=(%d+)') do costs[unit] = tonumber(n) end
    costs_of[s] = costs
  end
  return costs
end

-- "burst 5 3000000 0;..." -> {burst = {5, 3000000, 0}}; the fourth is the policy's for all
local function parse_params(s)
  local params = {}
  for name, a, b, c in string.gmatch(s, '(%S+) (%S+) (%S+) (%S+);') do
    params[name] = {tonumber(a), tonumber(b), tonumber(c)}
  end
  return params
end

-- The policy's windows by the attributes of their scope, with the policy's own parameters.
local definitions
local function define()
  local scope_attributes, base = {}, parse_params(base_params)
  definitions = {}
  for list in string.gmatch(attributes, '%S+') do
    if list == '-' then list = '' end
    scope_attributes[#scope_attributes + 1] = list
    definitions[list] = {}
  end
  for i = WINDOWS, #ARGV, STRIDE do
    local of_scope, name = definitions[scope_attributes[tonumber(ARGV[i])]], ARGV[i + 1]
    local params = base[name] or {tonumber(ARGV[i + 4]), tonumber(ARGV[i + 5]), tonumber(ARGV[i + 6])}
    params[4] = parameter(ARGV[i + 7])
    of_scope[#of_scope + 1] = {name = name, kind = ARGV[i + 2], unit = ARGV[i + 8], params = params}
  end
end

local nodes = {} -- by suffix: {suffix, scope, windows, held (by unit), shared, changed}

local function new_node(suffix, scope, of_scope)
  local list = string.match(suffix, '^w:([^:]*)')
  local node = {suffix = suffix, scope = scope, windows = of_scope, held = {}, shared = true, changed = false}
  for attribute in string.gmatch(list, '[^,]+') do
    if attribute == 'tenant' then node.shared = false end
  end
  for _, w in ipairs(of_scope) do
    node.held[w.unit] = held_units(scope, w.unit, now)
  end
  nodes[suffix] = node
  return node
end

-- The node of a flow, with its windows as they are for the flow. Nil if it cannot be read.
local function open_node(suffix, flow)
  local node = nodes[suffix]
  if node then return node end
  if not definitions then define() end
  local of_scope = definitions[string.match(suffix, '^w:([^:]*)')]
  local scope = parse_scope(redis.call('GET', P .. suffix))
  if not scope or not of_scope then return nil end
  if scope.last > now then
    -- A clock that was set back: what was opened before has to stand at the same time.
    now = scope.last
    for _, opened in pairs(nodes) do
      for _, w in ipairs(opened.windows) do w.state = w.algorithm.load(w, payload_of(opened.scope, w, now), now) end
    end
  end
  local windows = {}
  for i, d in ipairs(of_scope) do
    local p = flow.own[d.name] or d.params
    local w = {scope = scope, name = d.name, kind = d.kind, unit = d.unit, algorithm = algorithms[d.kind], p1 = p[1], p2 = p[2], p3 = p[3], p4 = d.params[4]}
    local payload = payload_of(scope, w, now)
    if payload and not w.algorithm.readable(payload) then return nil end
    w.state = w.algorithm.load(w, payload, now)
    windows[i] = w
  end
  return new_node(suffix, scope, windows)
end

local found_flows = {}
local function find_flow(id)
  local record = read('f', id)
  if not record then return nil end
  local flow = found_flows[id]
  if flow and flow.record == record then return flow end
  local w, name, suffixes, own = string.match(record, '^(%S+) (%S*) ([^;]*);(.*)$')
  flow = {id = id, record = record, weight = tonumber(w), tenant = name, suffixes = {}, own = parse_params(own)}
  for suffix in string.gmatch(suffixes, '%S+') do flow.suffixes[#flow.suffixes + 1] = suffix end
  found_flows[id] = flow
  return flow
end

local function find_ticket(id)
  local record = read('t', id)
  if not record then return nil end
  local state, rank, calls, promise, flow, costs = string.match(record, '^(%a) (%S+) (%d+) (%d+) (%S*) (%S*)$')
  return {id = id, state = state, rank = tonumber(rank), calls = tonumber(calls), promise = tonumber(promise), flow = flow,
    costs_text = costs, costs = parse_costs(costs)}
end

local function keep_ticket(t)
  write('t', t.id, t.state .. ' ' .. int(t.rank) .. ' ' .. t.calls .. ' ' .. int(t.promise) .. ' ' .. t.flow .. ' ' .. t.costs_text)
end

-- The first node, narrow to broad, that has no room for the costs, and when it may have; called says
-- that they are those of a ticket that was called.
local function blocker(flow, costs, called)
  for _, suffix in ipairs(flow.suffixes) do
    local node = open_node(suffix, flow)
    if node then
      local time = now
      for _, w in ipairs(node.windows) do
        local cost, opens = costs[w.unit] or 0, now
        if cost > 0 then
          opens = w.algorithm.fits_at(w, w.state, now, now, cost, node.held[w.unit])
          if opens > now and w.algorithm.opens_at then opens = w.algorithm.opens_at(w, w.state, now) end
        end
        if w.scope.told then opens = told_fits_at(w, now, opens, cost, node.held[w.unit], called) end
        time = max(time, opens)
      end
      if time > now then return node, time end
    end
  end
  return nil, now
end

local function change_held(flow, costs, sign)
  for _, suffix in ipairs(flow.suffixes) do
    local node = open_node(suffix, flow)
    if node then
      for unit in pairs(node.held) do
        if costs[unit] then node.held[unit] = max(0, node.held[unit] + sign * costs[unit]) end
      end
      node.changed = true
    end
  end
end

-- What the costs are of a node: the part of its tightest window.
local function share(node, costs)
  local part = 0
  for _, w in ipairs(node.windows) do part = max(part, (costs[w.unit] or 0) / w.algorithm.capacity(w)) end
  return part
end

-- Start-time fair queueing: a tenant's tag at a shared node moves by what it was granted of the
-- node's tightest window, over its weight. A call that came to nothing is taken back.
local function charge(flow, costs, sign)
  for _, suffix in ipairs(flow.suffixes) do
    local node = open_node(suffix, flow)
    if node and node.shared then
      local part = share(node, costs)
      local v, tag = 'v ' .. suffix, 't ' .. suffix .. ' ' .. flow.tenant
      read_all('u', {v, tag})
      local virtual, mine = number(v), number(tag)
      if sign > 0 then
        virtual = max(virtual, mine)
        mine = virtual
      end
      write('u', v, real_number(virtual))
      write('u', tag, real_number(mine + sign * part / flow.weight))
    end
  end
end

local function score(node, flow, first)
  if not node.shared then return int(first.rank) end
  local v, tag = 'v ' .. node.suffix, 't ' .. node.suffix .. ' ' .. flow.tenant
  read_all('u', {v, tag})
  return real_number(max(number(v), number(tag)))
end

local function due(node_suffix, time)
  local first = firsts.d
  if first and (first[1] == 0 or first[2] == node_suffix) then
    if first[1] == 0 or first[1] > time then set_time('d', node_suffix, time) end
    return
  end
  local known = redis.call('ZSCORE', P .. 'd', node_suffix)
  if not known or tonumber(known) > time then set_time('d', node_suffix, time) end
end

local function first_ticket(flow)
  local id = redis.call('ZRANGE', P .. 'f:' .. flow.id, 0, 0)[1]
  return id and find_ticket(id)
end

local function unplace(flow)
  local at = read('a', flow.id)
  if at then
    local suffix, member = string.match(at, '^(%S+) (.*)$')
    redis.call('ZREM', P .. 'n:' .. suffix, member)
    write('a', flow.id, false)
  end
end

-- make_way says that the first ticket of a flow is another now: whoever was behind it may fit.
local function make_way(flow)
  local at = read('a', flow.id)
  if at then due(string.match(at, '^(%S+)'), now) end
end

-- put lets the flow wait at the node with that first ticket.
local function put(node, flow, first)
  local member = string.format('%016d ', RANK_ZERO + first.rank) .. flow.id
  redis.call('ZADD', P .. 'n:' .. node.suffix, score(node, flow, first), member)
  write('a', flow.id, node.suffix .. ' ' .. member)
end

-- The first node broader than `suffix` (or of all, if that is nil) at which others wait: whoever
-- fits still goes in the order of that node.
local function others_at(flow, suffix)
  local broader = not suffix
  for _, other in ipairs(flow.suffixes) do
    if broader and redis.call('EXISTS', P .. 'n:' .. other) == 1 then
      local node = open_node(other, flow)
      if node then return node end
    end
    broader = broader or other == suffix
  end
end

-- place puts the flow where its first ticket has to wait, or at its broadest node if that fits now.
-- A flow that has no node any more, because the policy's scopes changed, waits for its tickets to come.
local function place(flow, first)
  local node, time = blocker(flow, first.costs)
  node = node or others_at(flow)
  for i = #flow.suffixes, 1, -1 do node = node or open_node(flow.suffixes[i], flow) end
  if node then
    put(node, flow, first)
    due(node.suffix, time)
  end
end

local function count(field, n)
  local before = number(field)
  local after = before + n
  if max(before, after) < MOST then
    if n ~= 0 then write('u', field, after > 0 and int(after)) end
  else
    -- More than Lua can count: Redis does.
    save_fields('u')
    redis.call('HINCRBY', P .. 'u', field, int(n))
    fields.u[field] = nil
  end
end

local function count_units(flow, costs, sign)
  for unit, n in pairs(costs) do
    count('f ' .. flow.id .. ' ' .. unit, sign * n)
    for _, suffix in ipairs(flow.suffixes) do count('n ' .. suffix .. ' ' .. unit, sign * n) end
  end
end

-- A waiting ticket may cost something else than was thought.
local function change_costs(t, costs)
  local flow = find_flow(t.flow)
  count_units(flow, t.costs, -1)
  t.costs_text, t.costs = costs, parse_costs(costs)
  count_units(flow, t.costs, 1)
  keep_ticket(t)
end

-- enter puts a ticket in the waiting part of its flow, at its rank; last says that it is behind
-- others of its flow, alone that the flow has no other.
local function enter(t, flow, last, alone)
  t.state = 'w'
  keep_ticket(t)
  redis.call('ZADD', P .. 'f:' .. flow.id, int(t.rank), t.id)
  count_units(flow, t.costs, 1)
  if alone then
    place(flow, t)
  elseif not last and redis.call('ZRANGE', P .. 'f:' .. flow.id, 0, 0)[1] == t.id then
    make_way(flow)
    unplace(flow)
    place(flow, t)
  end
end

-- quit takes a ticket out of the waiting part of its flow; whoever is first then moves up.
local function quit(t, flow)
  redis.call('ZREM', P .. 'f:' .. flow.id, t.id)
  count_units(flow, t.costs, -1)
end

local function move_up(flow)
  unplace(flow)
  local first = first_ticket(flow)
  if first then place(flow, first) end
end

-- let_go ends a hold. What was held is free for whoever is next.
local function let_go(t, flow)
  remove_time('c', t.id)
  if t.state == 'c' then
    change_held(flow, t.costs, -1)
    for _, suffix in ipairs(flow.suffixes) do
      if redis.call('ZCARD', P .. 'n:' .. suffix) > 0 then due(suffix, now) end
    end
  end
end

-- A call that came to nothing is not paid for.
local function take_back(t, flow)
  charge(flow, t.costs, -1)
  move_up(flow)
end

-- forget ends a ticket's time in the line, wherever it stands.
local function forget(t, flow)
  if t.state == 'w' then
    local was_first = redis.call('ZRANK', P .. 'f:' .. flow.id, t.id) == 0
    quit(t, flow)
    if was_first then
      make_way(flow)
      move_up(flow)
    end
  else
    let_go(t, flow)
    if t.state == 'c' then take_back(t, flow) end
  end
  write('t', t.id, false)
  read_all('u', {'c ' .. flow.id, 'w'})
  count('c ' .. flow.id, -1)
  if not read('u', 'c ' .. flow.id) then
    write('f', flow.id, false)
    count('w', -flow.weight)
  end
  if redis.call('DECR', P .. 'q') <= LINE_FORMAT * FORMATS then
    redis.call('DEL', P .. 'q', P .. 't', P .. 'f', P .. 'a', P .. 'd', P .. 'c', P .. 'u')
    fields, changed, empty = {t = {}, f = {}, a = {}, u = {}}, {}, true
    firsts.c, firsts.d = {0}, {0}
  end
end

-- In a sliding window the first ticket that does not fit beside those before it goes one period
-- after the first of them does, which another window may hold up longer. That is known where
-- all of the flow cost the same.
local function after_own(flow, w, cost, in_flow, behind)
  local span = floor(w.p1 / cost)
  if w.kind ~= 's' or #windows == 1 or span * cost > in_flow then return 0 end
  local waiting = redis.call('ZCARD', P .. 'f:' .. flow.id)
  local place = (behind or waiting) - span
  if waiting * cost ~= in_flow or place < 0 then return 0 end
  local id = redis.call('ZRANGE', P .. 'f:' .. flow.id, place, place)[1]
  return find_ticket(id).promise + w.p2
end

-- By how many such tickets the tenant has had more than others, which go before it now.
local function debt(node, flow, costs)
  local v, tag = 'v ' .. node.suffix, 't ' .. node.suffix .. ' ' .. flow.tenant
  return max(0, number(tag) - number(v)) * flow.weight / share(node, costs)
end

-- How many flows there are beside one that has so many tickets.
local function other_flows(tickets)
  if empty then return 0 end
  save_fields('f')
  return redis.call('HLEN', P .. 'f') - min(tickets, 1)
end

-- promise tells when a ticket will fit that comes last in its flow, or behind `behind` others of
-- it. At a node with other tenants, as many units go first as fair shares give them, one ticket
-- more of each, and no more than wait there; with behind_all, all of them. It also tells how many
-- tickets the flow has, whether any of them waits, and every window of the flow when it fits alone.
local function promise(flow, costs, behind, behind_all)
  local names = {'w', 'c ' .. flow.id, 'rank', 'limits', 'limits at'} -- the last ones for what follows
  for unit in pairs(costs) do names[#names + 1] = 'f ' .. flow.id .. ' ' .. unit end
  for _, suffix in ipairs(flow.suffixes) do
    local node = open_node(suffix, flow)
    for _, w in ipairs(node and node.windows or {}) do
      if costs[w.unit] then names[#names + 1] = 'n ' .. suffix .. ' ' .. w.unit end
    end
    if node and node.shared then
      names[#names + 1] = 'v ' .. suffix
      names[#names + 1] = 't ' .. suffix .. ' ' .. flow.tenant
    end
  end
  read_all('u', names)
  local tickets, weights = number('c ' .. flow.id), number('w')
  if tickets == 0 then weights = weights + flow.weight end
  local time, others, flows = now, false, nil
  for _, suffix in ipairs(flow.suffixes) do
    local node = open_node(suffix, flow)
    for _, w in ipairs(node and node.windows or {}) do
      local cost = costs[w.unit] or 0
      w.fits = 0
      if cost > 0 then
        local in_flow = number('f ' .. flow.id .. ' ' .. w.unit)
        others = others or in_flow > 0
        local before = behind and min(in_flow, behind * cost) or in_flow
        local ahead = number('n ' .. suffix .. ' ' .. w.unit) - in_flow + before
        if node.shared and not behind_all then
          flows = flows or other_flows(tickets)
          ahead = min(ahead, before + floor((before + debt(node, flow, costs) * cost) * (weights / flow.weight - 1) + 1e-6) + flows * cost)
        end
        local fits = fits_window(w, now, now, cost, max(0, ahead) + node.held[w.unit])
        fits = min(max(fits, after_own(flow, w, cost, in_flow, behind)), MOST)
        if fits > now then w.fits = fits end
        time = max(time, fits)
      elseif w.scope.told then
        local fits = told_fits_at(w, now, now, 0, 0)
        if fits > now then w.fits = fits end
        time = max(time, fits)
      end
    end
  end
  return time, tickets, others
end

local function call_up(t, flow)
  quit(t, flow)
  t.state, t.calls = 'c', t.calls + 1
  keep_ticket(t)
  set_time('c', t.id, now + hold)
  change_held(flow, t.costs, 1)
  charge(flow, t.costs, 1)
end

-- skip passes over a ticket, which keeps its rank, for a while.
local function skip(t)
  t.state = 's'
  keep_ticket(t)
  set_time('c', t.id, now + SKIP)
end

-- Holds that ran out: the ticket goes back to its rank; after two calls in vain it is skipped for a while.
local function expire_holds()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'c', '-inf', int(now), 'LIMIT', 0, 64)) do
    local t = find_ticket(id)
    local flow = t and find_flow(t.flow)
    if not flow then
      remove_time('c', id)
    else
      let_go(t, flow)
      if t.state == 'c' then take_back(t, flow) end
      if t.state == 'c' and t.calls >= 2 then
        skip(t)
      else
        enter(t, flow)
      end
    end
  end
end

-- serve calls the flows of one node while they fit. It returns how many flows it looked at.
local function serve(suffix, calls)
  local steps = 0
  while #calls < budget and steps < STEPS do
    steps = steps + 1
    local head = redis.call('ZRANGE', P .. 'n:' .. suffix, 0, 0, 'WITHSCORES')
    if not head[1] then
      remove_time('d', suffix)
      return steps
    end
    local member = head[1]
    local id = string.match(member, '^%d+ (.*)$')
    local flow = find_flow(id)
    local first = flow and first_ticket(flow)
    local node = flow and open_node(suffix, flow)
    local tag = node and node.shared and number('t ' .. suffix .. ' ' .. flow.tenant)
    if not first or not node then
      redis.call('ZREM', P .. 'n:' .. suffix, member)
      write('a', id, false)
      if first then place(flow, first) end
    elseif tag and tag > tonumber(head[2]) then
      -- The tenant's tag has moved since, by another flow of its.
      redis.call('ZADD', P .. 'n:' .. suffix, real_number(tag), member)
    else
      local blocked, time = blocker(flow, first.costs)
      blocked = blocked or others_at(flow, suffix)
      if not blocked then
        call_up(first, flow)
        calls[#calls + 1] = first.id
        move_up(flow)
      elseif blocked.suffix == suffix then
        set_time('d', suffix, time)
        return steps
      else
        redis.call('ZREM', P .. 'n:' .. suffix, member)
        put(blocked, flow, first)
        due(blocked.suffix, time)
      end
    end
  end
  return steps
end

local limits_due = 0 -- when other limits than the known ones are looked at, if they are not yet

-- soonest is when somebody must look again, or 0 if nobody waits.
local function soonest()
  local hold_ends, node_due = first_of('c'), first_of('d')
  if limits_due > 0 and node_due > limits_due then node_due = limits_due end
  if hold_ends == 0 or node_due == 0 then return max(hold_ends, node_due) end
  return min(hold_ends, node_due)
end

-- Other limits may let in whoever waits, and everybody has to be looked at again. While workers
-- disagree, in a rolling deploy, that is once a second.
local function limits_changed()
  local base, limits = parse_params(base_params), ''
  for i = WINDOWS, #ARGV, STRIDE do
    local own, params = base[ARGV[i + 1]], nil
    if own then params = string.format('%d %d %d', unpack(own)) else params = table.concat(ARGV, ' ', i + 4, i + 6) end
    limits = limits .. ARGV[i + 1] .. ARGV[i + 2] .. ' ' .. params .. ';'
  end
  read_all('u', {'limits', 'limits at'})
  local known = read('u', 'limits')
  if known == limits then return false end
  local time = number('limits at') + 1000000
  if now < time then
    limits_due = time
    return false
  end
  write('u', 'limits', limits)
  write('u', 'limits at', int(now))
  return known
end

-- call_next calls everybody who fits now, up to the budget, in line order.
local function call_next()
  local calls, steps = {}, 0
  local hold_ends = first_of('c')
  if hold_ends > 0 and hold_ends <= now then expire_holds() end
  local node_due, node = first_of('d')
  if node_due > 0 and limits_changed() then
    redis.call('ZUNIONSTORE', P .. 'd', 1, P .. 'd', 'WEIGHTS', '1e-6')
    firsts.d = nil
    node_due, node = first_of('d')
  end
  while node_due > 0 and node_due <= now and #calls < budget and steps < STEPS do
    steps = steps + serve(node, calls)
    node_due, node = first_of('d')
  end
  return calls
end

local function flush()
  for suffix, node in pairs(nodes) do
    if node.changed then
      for unit, units in pairs(node.held) do
        -- Nobody's room is held for longer than the newest hold, even if nobody comes to end it.
        put_section(node.scope, '/' .. unit, 'h', units > 0 and now + hold or 0, pack7(units))
      end
      write_scope(P .. suffix, node.scope, now, real)
    end
  end
  for key in pairs(changed) do save_fields(key) end
end

-- finish ends a call that had to do with the line: it calls whoever fits now, and adds to the
-- reply when somebody must look again, and the tickets called.
local function finish(status, time, calls)
  -- A clock that was set back tells waits from its own time, behind the windows'.
  local out = reply(status, status == 1 and now or real, time, windows, now)
  calls = calls or call_next()
  flush()
  out[#out + 1] = soonest()
  for _, id in ipairs(calls) do
    if id ~= ticket then out[#out + 1] = id end
  end
  return out
end

-- The nodes of this call's own windows, as they were opened already.
local mine = {id = flow_id, weight = weight, tenant = tenant, suffixes = {}, own = parse_params(own_params)}
for i, scope in ipairs(scopes) do
  local of_scope = {}
  for _, w in ipairs(windows) do
    if w.scope == scope then of_scope[#of_scope + 1] = w end
  end
  mine.suffixes[i] = sub(KEYS[i], #P + 1)
  new_node(mine.suffixes[i], scope, of_scope)
end

-- keep_flow writes what this call knows of its flow: limits and weights hold for all that wait.
local function keep_flow()
  local suffixes = table.concat(mine.suffixes, ' ')
  local record = int(weight) .. ' ' .. tenant .. ' ' .. suffixes .. ';' .. own_params
  local known = read('f', mine.id)
  if known == record then return end
  write('f', mine.id, record)
  if not known then return end
  local weight_before, suffixes_before = string.match(known, '^(%S+) %S* ([^;]*);')
  count('w', weight - tonumber(weight_before))
  if suffixes_before ~= suffixes then
    -- The policy's scopes have changed: what waits is counted elsewhere now.
    local units_known = {}
    for i = WINDOWS, #ARGV, STRIDE do units_known[ARGV[i + 8]] = true end
    for unit in pairs(units_known) do
      local units = number('f ' .. mine.id .. ' ' .. unit)
      for suffix in string.gmatch(suffixes_before, '%S+') do count('n ' .. suffix .. ' ' .. unit, -units) end
      for _, suffix in ipairs(mine.suffixes) do count('n ' .. suffix .. ' ' .. unit, units) end
    end
  end
  move_up(mine)
end

-- join puts this call's ticket at the end of its flow, or at the front of it, or where it stood
-- in another flow.
local function join(time, others, rank)
  local alone = number('c ' .. mine.id) == 0
  if alone then fields.f[mine.id] = false end -- so it has no record yet
  keep_flow()
  if not rank then
    local field = front and 'front' or 'rank'
    rank = number(field) + 1
    write('u', field, int(rank))
    if front then rank = -rank end
  end
  local t = {id = ticket, rank = rank, calls = 0, promise = time, flow = mine.id,
    costs_text = own_costs, costs = parse_costs(own_costs)}
  count('c ' .. mine.id, 1)
  if alone then count('w', weight) end
  redis.call('INCRBY', P .. 'q', empty and int(LINE_FORMAT * FORMATS + 1) or 1)
  enter(t, mine, others and not front, alone)
  return t
end

local function somebody_waits()
  for _, suffix in ipairs(mine.suffixes) do
    if redis.call('ZCARD', P .. 'n:' .. suffix) > 0 then return true end
  end
  return false
end
