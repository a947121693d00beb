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
--   q          how many tickets are in the line; no key, no line
--   t          hash: ticket -> "state rank calls promise flow costs"
--              state: w waits, c called, s skipped (called often and never came)
--   f          hash: flow -> "weight tenant suffixes own"; suffixes narrow to broad, by spaces
--   f:FLOW     sorted set: the waiting tickets of a flow by rank
--   a          hash: flow -> "suffix member" of the node at which it waits, and as what
--   n:SUFFIX   sorted set: the flows that wait at a node, by tag or rank, as members "RANK FLOW",
--              so that flows with equal tags go by the rank of their first ticket
--   d          sorted set: nodes by the time at which their first flow may fit (us)
--   c          sorted set: called tickets by the end of their hold, skipped ones by their next call (us)
--   u          hash: "f FLOW UNIT" and "n SUFFIX UNIT": waiting units; "c FLOW": tickets; "w": weights
--   g          hash: "v SUFFIX": virtual time; "t SUFFIX TENANT": a tenant's tag; "rank", "front";
--              "limits": those by which nodes were looked at last, and "limits at": since when
-- In a scope's value the section "/UNIT" of kind "h" holds the units of called tickets.

local P = sub(KEYS[#KEYS], 1, -2)
local SKIP = 60000000 -- us until a ticket that never came is called again
local RANK_ZERO = 4503599627370496 -- ranks before the first are negative
local STEPS = 256     -- how many flows one call looks at, at the most

local line = {}
for field in string.gmatch(ARGV[4] .. '\n', '([^\n]*)\n') do line[#line + 1] = field end
local ticket, flow_id, tenant, weight = line[1], line[2], line[3], tonumber(line[4])
local own_costs, front, hold, budget = line[5], line[6] == '1', tonumber(line[7]), tonumber(line[8])
local max_wait, backlog, attributes = tonumber(line[9]), tonumber(line[10]), line[11]
local own_params, base_params = line[12], line[13]

local function int(n) return string.format('%.0f', n) end
local function real_number(n) return string.format('%.17g', n) end

-- "requests=1,tokens=1500" -> {requests = 1, tokens = 1500}
local function parse_costs(s)
  local costs = {}
  for unit, n in string.gmatch(s, '([^=,]+)=(%d+)') do costs[unit] = tonumber(n) end
  return costs
end

-- "burst 5 3000000 0 0;..." -> {burst = {5, 3000000, 0, 0}}
local function parse_params(s)
  local params = {}
  for name, a, b, c, d in string.gmatch(s, '(%S+) (%S+) (%S+) (%S+) (%S+);') do
    params[name] = {tonumber(a), tonumber(b), tonumber(c), tonumber(d)}
  end
  return params
end

-- The policy's windows by the attributes of their scope, with the policy's own parameters.
local definitions, scope_attributes, units_known, limits = {}, {}, {}, ''
for list in string.gmatch(attributes, '%S+') do
  if list == '-' then list = '' end
  scope_attributes[#scope_attributes + 1] = list
  definitions[list] = {}
end
do
  local base = parse_params(base_params)
  for i = WINDOWS, #ARGV, STRIDE do
    local of_scope, name = definitions[scope_attributes[tonumber(ARGV[i])]], ARGV[i + 1]
    units_known[ARGV[i + 8]] = true
    local params = base[name] or {tonumber(ARGV[i + 4]), tonumber(ARGV[i + 5]), tonumber(ARGV[i + 6]), tonumber(ARGV[i + 7])}
    of_scope[#of_scope + 1] = {name = name, kind = ARGV[i + 2], unit = ARGV[i + 8], params = params}
    limits = limits .. name .. ARGV[i + 2]
    for p = 1, 4 do limits = limits .. ' ' .. int(params[p]) end
    limits = limits .. ';'
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
    local at = scope.at['/' .. w.unit]
    local section = at and scope.sections[at]
    node.held[w.unit] = section and section.expires > now and unpack7(section.payload, 1) or 0
  end
  nodes[suffix] = node
  return node
end

-- The node of a flow, with its windows as they are for the flow. Nil if it cannot be read.
local function open_node(suffix, flow)
  local node = nodes[suffix]
  if node then return node end
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
    local w = {name = d.name, kind = d.kind, unit = d.unit, algorithm = algorithms[d.kind], p1 = p[1], p2 = p[2], p3 = p[3], p4 = p[4]}
    local payload = payload_of(scope, w, now)
    if payload and not w.algorithm.readable(payload) then return nil end
    w.state = w.algorithm.load(w, payload, now)
    windows[i] = w
  end
  return new_node(suffix, scope, windows)
end

local function find_flow(id)
  local record = redis.call('HGET', P .. 'f', id)
  if not record then return nil end
  local w, name, suffixes, own = string.match(record, '^(%S+) (%S*) ([^;]*);(.*)$')
  local flow = {id = id, weight = tonumber(w), tenant = name, suffixes = {}, own = parse_params(own)}
  for suffix in string.gmatch(suffixes, '%S+') do flow.suffixes[#flow.suffixes + 1] = suffix end
  return flow
end

local function find_ticket(id)
  local record = redis.call('HGET', P .. 't', id)
  if not record then return nil end
  local state, rank, calls, promise, flow, costs = string.match(record, '^(%a) (%S+) (%d+) (%d+) (%S*) (%S*)$')
  return {id = id, state = state, rank = tonumber(rank), calls = tonumber(calls), promise = tonumber(promise), flow = flow,
    costs_text = costs, costs = parse_costs(costs)}
end

local function keep_ticket(t)
  redis.call('HSET', P .. 't', t.id, t.state .. ' ' .. int(t.rank) .. ' ' .. t.calls .. ' ' .. int(t.promise) .. ' ' .. t.flow .. ' ' .. t.costs_text)
end

-- The first node, narrow to broad, that has no room for the costs, and when it may have.
local function blocker(flow, costs)
  for _, suffix in ipairs(flow.suffixes) do
    local node = open_node(suffix, flow)
    if node then
      local time = now
      for _, w in ipairs(node.windows) do
        local cost = costs[w.unit] or 0
        if cost > 0 then
          time = max(time, w.algorithm.fits_at(w, w.state, now, now, cost, node.held[w.unit]))
        end
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
      local values = redis.call('HMGET', P .. 'g', v, tag)
      local virtual, mine = tonumber(values[1] or '0'), tonumber(values[2] or '0')
      if sign > 0 then
        virtual = max(virtual, mine)
        mine = virtual
      end
      redis.call('HSET', P .. 'g', v, real_number(virtual), tag, real_number(mine + sign * part / flow.weight))
    end
  end
end

local function score(node, flow, first)
  if not node.shared then return int(first.rank) end
  local values = redis.call('HMGET', P .. 'g', 'v ' .. node.suffix, 't ' .. node.suffix .. ' ' .. flow.tenant)
  return real_number(max(tonumber(values[1] or '0'), tonumber(values[2] or '0')))
end

local function due(node_suffix, time)
  local known = redis.call('ZSCORE', P .. 'd', node_suffix)
  if not known or tonumber(known) > time then redis.call('ZADD', P .. 'd', int(time), node_suffix) end
end

local function first_ticket(flow)
  local id = redis.call('ZRANGE', P .. 'f:' .. flow.id, 0, 0)[1]
  return id and find_ticket(id)
end

local function unplace(flow)
  local at = redis.call('HGET', P .. 'a', flow.id)
  if at then
    local suffix, member = string.match(at, '^(%S+) (.*)$')
    redis.call('ZREM', P .. 'n:' .. suffix, member)
    redis.call('HDEL', P .. 'a', flow.id)
  end
end

-- put lets the flow wait at the node with that first ticket.
local function put(node, flow, first)
  local member = string.format('%016.0f ', RANK_ZERO + first.rank) .. flow.id
  redis.call('ZADD', P .. 'n:' .. node.suffix, score(node, flow, first), member)
  redis.call('HSET', P .. 'a', flow.id, node.suffix .. ' ' .. member)
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
  if n ~= 0 and redis.call('HINCRBY', P .. 'u', field, int(n)) <= 0 then redis.call('HDEL', P .. 'u', field) end
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
-- others of its flow.
local function enter(t, flow, last)
  t.state = 'w'
  keep_ticket(t)
  redis.call('ZADD', P .. 'f:' .. flow.id, int(t.rank), t.id)
  count_units(flow, t.costs, 1)
  if not last and redis.call('ZRANGE', P .. 'f:' .. flow.id, 0, 0)[1] == t.id then
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
  redis.call('ZREM', P .. 'c', t.id)
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
    if was_first then move_up(flow) end
  else
    let_go(t, flow)
    if t.state == 'c' then take_back(t, flow) end
  end
  redis.call('HDEL', P .. 't', t.id)
  if redis.call('HINCRBY', P .. 'u', 'c ' .. flow.id, -1) <= 0 then
    redis.call('HDEL', P .. 'u', 'c ' .. flow.id)
    redis.call('HDEL', P .. 'f', flow.id)
    redis.call('HINCRBY', P .. 'u', 'w', int(-flow.weight))
  end
  if redis.call('DECR', P .. 'q') <= 0 then
    redis.call('DEL', P .. 'q', P .. 't', P .. 'f', P .. 'a', P .. 'd', P .. 'c', P .. 'u', P .. 'g')
  end
end

-- In a sliding window the first ticket that does not fit beside those before it goes one period
-- after the first of them does, which another window may hold up longer. That is known where
-- all of the flow cost the same.
local function after_own(flow, w, cost, in_flow, behind)
  local span = floor(w.p1 / cost)
  if w.kind ~= 's' or span * cost > in_flow then return 0 end
  local waiting = redis.call('ZCARD', P .. 'f:' .. flow.id)
  local place = (behind or waiting) - span
  if waiting * cost ~= in_flow or place < 0 then return 0 end
  local id = redis.call('ZRANGE', P .. 'f:' .. flow.id, place, place)[1]
  return find_ticket(id).promise + w.p2
end

-- By how many such tickets the tenant has had more than others, which go before it now.
local function debt(node, flow, costs)
  local values = redis.call('HMGET', P .. 'g', 'v ' .. node.suffix, 't ' .. node.suffix .. ' ' .. flow.tenant)
  return max(0, tonumber(values[2] or '0') - tonumber(values[1] or '0')) * flow.weight / share(node, costs)
end

-- promise tells when a ticket will fit that comes last in its flow, or behind `behind` others of
-- it. At a node with other tenants, as many units go first as fair shares give them, one ticket
-- more of each, and no more than wait there; with behind_all, all of them. It also tells how many
-- tickets the flow has, whether any of them waits, and every window of the flow when it fits alone.
local function promise(flow, costs, behind, behind_all)
  local fields = {'w', 'c ' .. flow.id}
  for unit in pairs(costs) do
    fields[#fields + 1] = 'f ' .. flow.id .. ' ' .. unit
    for _, suffix in ipairs(flow.suffixes) do fields[#fields + 1] = 'n ' .. suffix .. ' ' .. unit end
  end
  local values, units = redis.call('HMGET', P .. 'u', unpack(fields)), {}
  for i, field in ipairs(fields) do units[field] = tonumber(values[i] or '0') end
  local tickets = units['c ' .. flow.id]
  if tickets == 0 then units['w'] = units['w'] + flow.weight end
  local time, others, flows = now, false, nil
  for _, suffix in ipairs(flow.suffixes) do
    local node = open_node(suffix, flow)
    for _, w in ipairs(node and node.windows or {}) do
      local cost = costs[w.unit] or 0
      w.fits = 0
      if cost > 0 then
        local in_flow = units['f ' .. flow.id .. ' ' .. w.unit]
        others = others or in_flow > 0
        local before = behind and min(in_flow, behind * cost) or in_flow
        local ahead = units['n ' .. suffix .. ' ' .. w.unit] - in_flow + before
        if node.shared and not behind_all then
          flows = flows or redis.call('HLEN', P .. 'f') - min(tickets, 1)
          ahead = min(ahead, before + floor((before + debt(node, flow, costs) * cost) * (units['w'] / flow.weight - 1) + 1e-6) + flows * cost)
        end
        local fits = w.algorithm.fits_at(w, w.state, now, now, cost, max(0, ahead) + node.held[w.unit])
        fits = max(fits, after_own(flow, w, cost, in_flow, behind))
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
  redis.call('ZADD', P .. 'c', int(now + hold), t.id)
  change_held(flow, t.costs, 1)
  charge(flow, t.costs, 1)
end

-- skip passes over a ticket, which keeps its rank, for a while.
local function skip(t)
  t.state = 's'
  keep_ticket(t)
  redis.call('ZADD', P .. 'c', int(now + SKIP), t.id)
end

-- Holds that ran out: the ticket goes back to its rank; after two calls in vain it is skipped for a while.
local function expire_holds()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'c', '-inf', int(now), 'LIMIT', 0, 64)) do
    local t = find_ticket(id)
    local flow = t and find_flow(t.flow)
    if not flow then
      redis.call('ZREM', P .. 'c', id)
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
      redis.call('ZREM', P .. 'd', suffix)
      return steps
    end
    local member = head[1]
    local id = string.match(member, '^%d+ (.*)$')
    local flow = find_flow(id)
    local first = flow and first_ticket(flow)
    local node = flow and open_node(suffix, flow)
    local tag = node and node.shared and redis.call('HGET', P .. 'g', 't ' .. suffix .. ' ' .. flow.tenant)
    if not first or not node then
      redis.call('ZREM', P .. 'n:' .. suffix, member)
      redis.call('HDEL', P .. 'a', id)
      if first then place(flow, first) end
    elseif tag and tonumber(tag) > tonumber(head[2]) then
      -- The tenant's tag has moved since, by another flow of its.
      redis.call('ZADD', P .. 'n:' .. suffix, tag, member)
    else
      local blocked, time = blocker(flow, first.costs)
      blocked = blocked or others_at(flow, suffix)
      if not blocked then
        call_up(first, flow)
        calls[#calls + 1] = first.id
        move_up(flow)
      elseif blocked.suffix == suffix then
        redis.call('ZADD', P .. 'd', int(time), suffix)
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

-- first_due is the time at which somebody must look at the called ('c') or the nodes ('d').
local function first_due(key)
  return tonumber(redis.call('ZRANGE', P .. key, 0, 0, 'WITHSCORES')[2] or '0')
end

-- soonest is when somebody must look again, or 0 if nobody waits.
local function soonest()
  local hold_ends, node_due = first_due('c'), first_due('d')
  if hold_ends == 0 or node_due == 0 then return max(hold_ends, node_due) end
  return min(hold_ends, node_due)
end

-- Other limits may let in whoever waits, and everybody has to be looked at again. While workers
-- disagree, in a rolling deploy, that is once a second.
local function limits_changed()
  local known = redis.call('HMGET', P .. 'g', 'limits', 'limits at')
  if known[1] == limits or now - tonumber(known[2] or '0') < 1000000 then return false end
  redis.call('HSET', P .. 'g', 'limits', limits, 'limits at', int(now))
  return known[1]
end

-- call_next calls everybody who fits now, up to the budget, in line order.
local function call_next()
  local calls, steps = {}, 0
  local hold_ends = first_due('c')
  if hold_ends > 0 and hold_ends <= now then expire_holds() end
  local node_due = first_due('d')
  if node_due > 0 and limits_changed() then
    redis.call('ZUNIONSTORE', P .. 'd', 1, P .. 'd', 'WEIGHTS', '1e-6')
    node_due = first_due('d')
  end
  while node_due > 0 and node_due <= now and #calls < budget and steps < STEPS do
    steps = steps + serve(redis.call('ZRANGE', P .. 'd', 0, 0)[1], calls)
    node_due = first_due('d')
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
  local known = redis.call('HGET', P .. 'f', mine.id)
  if known == record then return end
  redis.call('HSET', P .. 'f', mine.id, record)
  if not known then return end
  local weight_before, suffixes_before = string.match(known, '^(%S+) %S* ([^;]*);')
  redis.call('HINCRBY', P .. 'u', 'w', int(weight - tonumber(weight_before)))
  if suffixes_before ~= suffixes then
    -- The policy's scopes have changed: what waits is counted elsewhere now.
    for unit in pairs(units_known) do
      local units = tonumber(redis.call('HGET', P .. 'u', 'f ' .. mine.id .. ' ' .. unit) or '0')
      for suffix in string.gmatch(suffixes_before, '%S+') do count('n ' .. suffix .. ' ' .. unit, -units) end
      for _, suffix in ipairs(mine.suffixes) do count('n ' .. suffix .. ' ' .. unit, units) end
    end
  end
  move_up(mine)
end

-- join puts this call's ticket at the end of its flow, or at the front of it, or where it stood
-- in another flow.
local function join(time, others, rank)
  keep_flow()
  if not rank then
    rank = redis.call('HINCRBY', P .. 'g', front and 'front' or 'rank', 1)
    if front then rank = -rank end
  end
  local t = {id = ticket, rank = rank, calls = 0, promise = time, flow = mine.id,
    costs_text = own_costs, costs = parse_costs(own_costs)}
  if redis.call('HINCRBY', P .. 'u', 'c ' .. mine.id, 1) == 1 then redis.call('HINCRBY', P .. 'u', 'w', int(weight)) end
  redis.call('INCR', P .. 'q')
  enter(t, mine, others and not front)
  return t
end

local function somebody_waits()
  for _, suffix in ipairs(mine.suffixes) do
    if redis.call('ZCARD', P .. 'n:' .. suffix) > 0 then return true end
  end
  return false
end
