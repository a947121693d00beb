-- line.lua: the waiting line of a policy, as it is kept.
--
-- Who waits is a ticket. The tickets of one tenant, attributes and queue form a flow, first come, first served. A
-- flow waits at one node: the narrowest scope value that has no room for its first ticket, or, if all have, the
-- one that all share (ROOT), where it waits for a handler slot. Flows wait at a node of several tenants by start-time
-- fair queueing (Goyal, Vin, Cheng: "Start-time Fair Queueing", 1996), at a tenant's own by the rank of their first ticket.
-- Nodes, tags and V are those of one queue; the windows are counted for all queues together.
--
-- A queue whose name begins with "!" holds the claims of one process: tickets of calls that wait in place, and that only this
-- process takes. Names of others are escaped and have none.
--
-- Keys, behind the prefix P of the policy; a SUFFIX is a scope's key behind P, a NODE is "QUEUE|SUFFIX":
--   q          how many tickets are in the line; no key, no line
--   t          hash: ticket "QUEUE/ID" -> rank(7) start(7) "costs |VALUES key": start is the latest one expected when it joined (us);
--              costs are empty for "requests=1"
--   f          hash: flow "QUEUE|VALUES" -> "tickets hour suffix rank tag weight tenant suffixes units;own": suffix and rank say where
--              and as what it waits, "-" nowhere; tag is its tenant's at ROOT; suffixes narrow to broad, by "+"; units
--              "requests=1" if all tickets cost that, else "unit=sum/least/most,..."
--   f:FLOW     sorted set: the tickets of a flow by rank
--   n:NODE     sorted set: the flows that wait at a node, by tag or rank, as members "RANK FLOW", so that flows with
--              equal tags go by the rank of their first ticket
--   d:QUEUE    sorted set: suffixes of nodes by the time at which their first flow may fit (us)
--   g:NODE     sorted set: tenants by their tag, where it is above V and no flow has it
--   u          hash: "n NODE" -> "tickets V units"; "line" -> "rank front limits_at hour": the last ranks given, since when nodes were
--              looked at by "limits", when keys were renewed
--   z          hash: queue -> "asked tickets weights first last with": when a server asked for it last, what waits in it, the first and
--              last appointment of servers that will ask, and what queues that are asked for together have in common, "-" if it is alone
--   s:SUFFIX   string: the turns of queues that are not (line_turns.lua)
--   k          sorted set: processes by the time of a take that they have not acknowledged; k:PROCESS: what they took
-- Every key has a TTL of a day, or of two periods of the longest window, and is renewed while it is used.
--
-- new_line(call) -> L, what the verbs of line_join.lua and line_take.lua are made of. It is made only for calls that find a line
-- or that join it: most find none.

local DAY = 86400
local function expire(key, seconds) redis.call('EXPIRE', key, seconds) end

local new_line
do
local match, gmatch, sub, find, format, byte = string.match, string.gmatch, string.sub, string.find, string.format, string.byte
local max, min, ceil = math.max, math.min, math.ceil
local pack7, unpack7 = codec.pack7, codec.unpack7

local RANK_ZERO = 4503599627370496 -- ranks before the first are negative
local UNPACK = 4000     -- how many values go with one call to Redis; even
local DEAD = 60000000   -- us without a server that asks, after which a queue holds up nobody
local DEAD_CLAIMS = 2000000 -- the same of claims, which their process has to ask for
local SLOTS = 100000    -- us between looks for slots of who waits in place
local LOOK_AGAIN = 1000000 -- us after which one that leaves room for others looks again, at the latest
local COMMON = 'requests=1' -- the costs of most tickets
local SHARE = 100000000 -- what a tag moves by for all that a window holds

function new_line(call)
  local P, now = call.P, call.now
  local hour = format('%d', now / 3600000000)
  local L = {
    count = call.waiting, before = call.waiting, call = call, RANK_ZERO = RANK_ZERO,
    fields = {t = {}, f = {}, u = {}}, written = {t = {}, f = {}, u = {}}, -- fields of hashes, read once and written in the end
    nodes = {}, flows = {}, queues = false, numbers = {},                  -- numbers: scopes by their attributes
    dues = {}, dues_changed = {},                                          -- when nodes are due, by queue and suffix
    added = {}, gone = {}, placed = {},                                    -- to be written in the end
    rank = false, front = false, limits_at = false, renewed = false, renew = false,       -- of the field "line"
    read = false, read_all = false, write = false, read_line = false, queue_of = false, alive = false, node_of = false, flow_of = false,
    new_flow = false, ticket = false, new_ticket = false, scopes_of = false, nodes_of = false, blocker = false, count_units = false, units_of = false, share = false,
    tag_of = false, set_tag = false, charge = false, waiting = false, score = false, due_at = false, set_due = false, due = false, reopen = false, place = false,
    first_ticket = false, forget = false, flush = false, finish = false, ttl = DAY, turns = nil, dead_claims = false,
  }
  local fields, written, nodes, flows, dues, dues_changed = L.fields, L.written, L.nodes, L.flows, L.dues, L.dues_changed
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

  -- read_all reads fields that will be asked for in one call.
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
    for from = 1, n, UNPACK do
      local found = redis.call('HMGET', P .. key, unpack(unread, from, min(n, from + UNPACK - 1)))
      for i = 1, #found do known[unread[from + i - 1]] = found[i] end
    end
  end

  -- write sets a field to a string, or deletes it, by false.
  function L.write(key, field, value)
    fields[key][field] = value
    written[key][field] = true
  end

  -- read_line reads what every verb needs: the queues, and the line's own numbers.
  function L.read_line()
    if L.queues then return end
    L.queues = {}
    if L.before > 0 then
      local all = redis.call('HGETALL', P .. 'z')
      for i = 1, #all, 2 do
        local asked, n, weights, first, last, with = match(all[i + 1], '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+)$')
        L.queues[all[i]] = {
          name = all[i], claims = byte(all[i]) == 33, asked = asked + 0, n = n + 0, weights = weights + 0, first = first + 0, last = last + 0,
          with = with == '-' and '=' .. all[i] or with, changed = false,
        }
        local q = L.queues[all[i]]
        if q.claims and q.n > 0 and not L.alive(q) then L.dead_claims = true end
      end
    end
    local own = L.read('u', 'line')
    local rank, front, limits_at, renewed = match(own or '0 0 0 -', '^(%S+) (%S+) (%S+) (%S+)$')
    L.rank, L.front, L.limits_at, L.renewed = rank + 0, front + 0, limits_at + 0, renewed
  end

  function L.queue_of(name)
    local q = L.queues[name]
    if not q then
      q = {name = name, claims = byte(name) == 33, asked = now, n = 0, weights = 0, first = 0, last = 0, with = '=' .. name, changed = false}
      L.queues[name] = q
    end
    return q
  end

  local function dead(q) return now - q.asked >= (q.claims and DEAD_CLAIMS or DEAD) end

  -- A queue that nobody asks for holds up nobody.
  function L.alive(q) return q.n > 0 and not dead(q) end

  -- What tickets cost is kept as one text while all cost the same, and by unit otherwise.
  local function parse_units(of, text)
    if of.n == 0 then return end
    if not find(text, '/', 1, true) then
      of.same = windows.costs_of(call, text)
      return
    end
    of.units = {}
    for unit, sum, least, most in gmatch(text, '([^=,]+)=(%d+)/(%d+)/(%d+)') do of.units[unit] = {sum + 0, least + 0, most + 0} end
  end

  local function units_text(of)
    if of.same then return of.same.text end
    local parts, n = {}, 0
    for unit, u in pairs(of.units or {}) do
      n = n + 1
      parts[n] = format('%s=%d/%d/%d', unit, u[1], u[2], u[3])
    end
    return n > 0 and table.concat(parts, ',') or '-'
  end

  -- count_units adds a ticket's costs to what a flow or a node counts (sign 1), or takes them off (-1).
  function L.count_units(of, costs, sign)
    local n = of.n + sign
    of.n, of.changed = n, true
    if n <= 0 then
      of.n, of.same, of.units = 0, nil, nil
      return
    end
    if not of.units then
      if of.same == costs then return end
      if n == 1 and sign == 1 then
        of.same = costs
        return
      end
      of.units = {}
      for unit, cost in pairs(of.same and of.same.units or {}) do of.units[unit] = {cost * (n - sign), cost, cost} end
      of.same = nil
    end
    for unit, cost in pairs(costs.units) do
      local u = of.units[unit]
      if not u then
        of.units[unit] = {max(0, sign * cost), cost, cost}
      else
        u[1] = max(0, min(u[1] + sign * cost, codec.MOST))
        if cost < u[2] then u[2] = cost end
        if cost > u[3] then u[3] = cost end
      end
    end
  end

  -- units_of -> sum, least and most of what the tickets cost in a unit.
  function L.units_of(of, unit)
    if of.same then
      local cost = of.same.units[unit]
      if not cost then return 0, codec.MOST, 0 end
      return cost * of.n, cost, cost
    end
    local u = of.units and of.units[unit]
    if not u then return 0, codec.MOST, 0 end
    return u[1], u[2], u[3]
  end

  function L.node_of(queue, suffix)
    local name = queue .. '|' .. suffix
    local node = nodes[name]
    if node then return node end
    local attributes = match(suffix, '^w:([^:]*)')
    node = {
      name = name, queue = queue, suffix = suffix, number = L.numbers[attributes], n = 0, v = 0, same = nil, units = nil, changed = false,
      shared = attributes == '' or not find(',' .. attributes .. ',', ',tenant,', 1, true), list = nil, more = nil, tags = nil,
    }
    nodes[name] = node
    local record = L.read('u', 'n ' .. name)
    if record then
      local n, v, units = match(record, '^(%d+) (%d+) (%S+)$')
      node.n, node.v = n + 0, v + 0
      parse_units(node, units)
    end
    return node
  end

  function L.new_flow(id, weight, tenant, suffixes, own_text)
    local queue = match(id, '^([^|]*)')
    local flow = {
      id = id, queue = queue, values = sub(id, #queue + 1), weight = weight, tenant = tenant, suffixes = suffixes, own_text = own_text,
      own = windows.own_parameters(call, own_text), n = 0, same = nil, units = nil, changed = false, hour = nil, suffix = nil, rank = nil, tag = 0,
      stored_suffix = nil, stored_rank = nil, stored_tag = nil, heads = nil, head = 1, popped = 0, scopes = nil, nodes = nil, gone = nil,
    }
    return flow
  end

  function L.flow_of(id)
    local flow = flows[id]
    if flow ~= nil then return flow end
    local record = L.read('f', id)
    if not record then
      flows[id] = false
      return false
    end
    local n, renewed, suffix, rank, tag, weight, tenant, list, units, own = match(record, '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) ([^ ;]+);(.*)$')
    local suffixes, count = {}, 0
    for s in gmatch(list, '[^+]+') do
      count = count + 1
      suffixes[count] = s
    end
    flow = L.new_flow(id, weight + 0, tenant, suffixes, own)
    flow.n, flow.hour, flow.tag, flow.stored_tag = n + 0, renewed, tag + 0, tag + 0
    parse_units(flow, units)
    if suffix ~= '-' then flow.suffix, flow.rank, flow.stored_suffix, flow.stored_rank = suffix, rank, suffix, rank end
    flows[id] = flow
    return flow
  end

  -- new_ticket puts a ticket in a flow.
  function L.new_ticket(id, flow, costs, rank, key, start)
    local text = costs.text ~= COMMON and costs.text or ''
    L.write('t', id, pack7(rank + 0) .. pack7(start) .. text .. ' ' .. flow.values .. ' ' .. key)
  end

  -- ticket -> the id of its flow, the text of its costs, its key, its rank as text; nil if it is not in line.
  function L.ticket(id)
    local record = L.read('t', id)
    if not record then return nil end
    local costs, values, key = match(record, '^(%S*) (%S*) (%S+)$', 15)
    return match(id, '^[^/]*') .. values, costs ~= '' and costs or COMMON, key, format('%d', unpack7(record, 1))
  end

  -- The scopes of a flow whose windows the policy still has, narrow to broad, and the time at which they stand.
  function L.scopes_of(flow)
    local list = flow.scopes
    if list then
      for i = 1, #list do
        if list[i].own ~= flow.own and list[i].of.of_tenant then scopes.open(call, list[i].suffix, list[i].of.number, flow.own) end
      end
      return list, windows.align(call, list)
    end
    list = {}
    for i = 1, #flow.suffixes do
      local suffix = flow.suffixes[i]
      local number = L.numbers[match(suffix, '^w:([^:]*)')]
      if number and suffix ~= windows.ROOT then list[#list + 1] = scopes.open(call, suffix, number, flow.own) end
    end
    if L.numbers[''] then list[#list + 1] = scopes.open(call, windows.ROOT, L.numbers[''], nil) end
    flow.scopes = list
    return list, windows.align(call, list)
  end

  -- The nodes that count a flow's tickets besides itself. What only counts a tenant's own the flow counts.
  function L.nodes_of(flow)
    local list = flow.nodes
    if list then return list end
    list = {}
    if not call.only_tenants then
      for i = 1, #flow.suffixes do
        if flow.suffixes[i] ~= windows.ROOT then list[#list + 1] = L.node_of(flow.queue, flow.suffixes[i]) end
      end
    end
    list[#list + 1] = L.node_of(flow.queue, windows.ROOT)
    flow.nodes = list
    return list
  end

  -- When slots may be free: who waits in place looks for them more often.
  local function slots_open_at(flow, algorithm, st, at)
    local opens = algorithm.opens_at(st, at)
    return byte(flow.queue) == 33 and min(opens, at + SLOTS) or opens
  end

  -- with_turns is when a window opens that has room left for others: when they let that lapse, at the latest.
  local function with_turns(flow, scope, i, at, cost, before, opens, lapses)
    local window, st, alone = call.windows[i], scope.states[i], at
    if cost > 0 then
      alone = window.algorithm.fits_at(st, at, at, cost, before, 1)
      if alone > at and window.algorithm.opens_at then alone = slots_open_at(flow, window.algorithm, st, at) end
    end
    if scope.upstream then alone = upstream().fits_at(scope, window, st, at, alone, cost, before) end
    return min(opens, max(alone, lapses), at + LOOK_AGAIN)
  end

  -- blocker -> the first scope, narrow to broad, that has no room for the costs, and when it may have. The third says that
  -- they exceed for ever what one holds. L.turns, if set, has it leave room for others whose turn it is.
  function L.blocker(flow, costs)
    local list, at = L.scopes_of(flow)
    local blocked, blocked_until, by_window, turns = nil, at, costs.windows, L.turns
    for s = 1, #list do
      local scope = list[s]
      if scope.failed then return scope, now + 1000000, false end
      local of, states, ahead = scope.of.windows, scope.states, scope.ahead
      local turn = turns and turns.at(flow, scope)
      for j = 1, #of do
        local i = of[j]
        local window, st, cost, opens = call.windows[i], states[i], by_window[i], at
        local algorithm, before = window.algorithm, ahead and ahead[window.unit] or 0
        local reserved = turn and turn.reserved[window.unit] or 0
        if cost > 0 then
          if cost > algorithm.capacity(st) then return nil, at, true end
          opens = algorithm.fits_at(st, at, at, cost, before + reserved, 1)
          if opens > at and algorithm.opens_at then opens = slots_open_at(flow, algorithm, st, at) end
        end
        if scope.upstream then opens = upstream().fits_at(scope, window, st, at, opens, cost, before + reserved) end
        if reserved > 0 and opens > at then opens = with_turns(flow, scope, i, at, cost, before, opens, turn.lapses) end
        if opens > at and (not blocked or blocked == scope) then
          blocked = scope
          if opens > blocked_until then blocked_until = opens end
        end
      end
    end
    return blocked, blocked_until, false
  end

  -- What costs are of a node: the part of its tightest window; of a slot where it has none.
  function L.share(node, costs)
    if not node.number then return SHARE / 1000 end
    local scope, part = scopes.open(call, node.suffix, node.number, nil), 0
    local of = scope.of.windows
    for j = 1, #of do
      local i = of[j]
      local p = costs.windows[i] / call.windows[i].algorithm.capacity(scope.states[i])
      if p > part then part = p end
    end
    return part > 0 and part * SHARE or SHARE / 1000
  end

  -- A tenant's tag at a shared node. Where only tenants count, its one flow has it.
  function L.tag_of(node, flow)
    if call.only_tenants and flow.n > 0 then return flow.tag end
    node.tags = node.tags or {}
    local tag = node.tags[flow.tenant]
    if not tag then
      tag = L.before > 0 and (redis.call('ZSCORE', P .. 'g:' .. node.name, flow.tenant) or 0) + 0 or 0
      node.tags[flow.tenant] = tag
    end
    return tag
  end

  function L.set_tag(node, flow, tag)
    if call.only_tenants then flow.tag, flow.changed = tag, true end
    if not call.only_tenants or flow.n == 0 then
      node.tags = node.tags or {}
      node.tags[flow.tenant] = tag
      node.new_tags = node.new_tags or {}
      node.new_tags[flow.tenant] = tag
    end
  end

  -- Start-time fair queueing: a tenant's tag moves by what it was granted of the node's tightest window, over
  -- its weight (in thousandths). What is put back is taken back.
  function L.charge(flow, costs, sign)
    local list = L.nodes_of(flow)
    for i = 1, #list do
      local node = list[i]
      if node.shared then
        local tag = L.tag_of(node, flow)
        if sign > 0 then
          if tag < node.v then
            tag = node.v
          elseif tag > node.v then
            node.v, node.changed, node.v_changed = tag, true, true
          end
        end
        L.set_tag(node, flow, max(0, tag + sign * max(1, ceil(L.share(node, costs) * 1000 / flow.weight))))
      end
    end
  end

  -- The order of a flow at a node: by tag, or by the rank of its first ticket.
  function L.score(node, flow)
    if not node.shared then return flow.rank + 0 end
    local tag = L.tag_of(node, flow)
    if tag < node.v then
      tag = node.v
      if call.only_tenants then flow.tag = tag end
    end
    return tag
  end

  function L.due_at(queue, suffix)
    local known = dues[queue]
    if not known then
      known = {}
      dues[queue] = known
    end
    local time = known[suffix]
    if time == nil then
      time = L.before > 0 and redis.call('ZSCORE', P .. 'd:' .. queue, suffix)
      time = time and time + 0
      known[suffix] = time
    end
    return time
  end

  function L.set_due(queue, suffix, time)
    local known = dues[queue]
    if not known then
      known = {}
      dues[queue] = known
    end
    if known[suffix] == time then return end
    known[suffix] = time
    dues_changed[queue] = dues_changed[queue] or {}
    dues_changed[queue][suffix] = true
  end

  function L.due(queue, suffix, time)
    local known = L.due_at(queue, suffix)
    if not known or known > time then L.set_due(queue, suffix, time) end
  end

  -- reopen has the nodes of several tenants looked at that a flow may have passed, but for the one where it waits now: it does not take
  -- what was kept for it there.
  function L.reopen(flow, at)
    if call.only_tenants then return end
    local list = L.scopes_of(flow)
    for s = 1, #list do
      local suffix = list[s].suffix
      if suffix ~= at and suffix ~= windows.ROOT and not list[s].of.of_tenant and L.due_at(flow.queue, suffix) then L.due(flow.queue, suffix, now) end
    end
  end

  -- place has a flow wait where its first ticket, of that rank, has to.
  function L.place(flow, rank, costs)
    local blocked, time = L.blocker(flow, costs)
    flow.suffix, flow.rank, flow.changed = blocked and blocked.suffix or windows.ROOT, rank, true
    flow.score = L.score(L.node_of(flow.queue, flow.suffix), flow)
    L.due(flow.queue, flow.suffix, blocked and time or now)
  end

  -- first_ticket -> {id, costs, rank, key}, or nil: those that were taken are removed in the end.
  function L.first_ticket(flow)
    while true do
      local id = flow.heads and flow.heads[flow.head]
      if not id then
        if flow.read_to_end then return nil end
        L.flush_added()
        flow.heads, flow.head = redis.call('ZRANGE', P .. 'f:' .. flow.id, format('%d', flow.popped), format('%d', flow.popped + 15)), 1
        id = flow.heads[1]
        if not id then
          flow.read_to_end = true
          return nil
        end
        L.read_all('t', flow.heads)
      end
      local of, costs, key, rank = L.ticket(id)
      if of == flow.id then return {id = id, costs = windows.costs_of(call, costs), rank = rank, key = key} end
      -- It was evicted, or is a leftover of a line that expired.
      flow.head, flow.popped = flow.head + 1, flow.popped + 1
    end
  end

  -- forget takes a ticket off everything that counts it.
  function L.forget(flow, id, costs)
    L.waiting = {}
    L.write('t', id, false)
    L.count = L.count - 1
    local q = L.queue_of(flow.queue)
    q.n, q.changed = max(0, q.n - 1), true
    L.count_units(flow, costs, -1)
    local list = L.nodes_of(flow)
    for i = 1, #list do L.count_units(list[i], costs, -1) end
    if flow.n == 0 then
      q.weights = max(0, q.weights - flow.weight)
      flow.suffix, flow.gone = nil, true
      local root = list[#list]
      if call.only_tenants and flow.tag > root.v then L.set_tag(root, flow, flow.tag) end
    end
  end

  local function call_in_parts(name, key, list)
    local n = #list
    if n == 0 then return end
    if n <= UNPACK then
      redis.call(name, key, unpack(list))
      return
    end
    for from = 1, n, UNPACK do redis.call(name, key, unpack(list, from, min(n, from + UNPACK - 1))) end
  end

  -- Tickets that join in this call are added in the end, or before somebody looks.
  function L.flush_added()
    if not next(L.added) then return end
    for id, list in pairs(L.added) do call_in_parts('ZADD', P .. 'f:' .. id, list) end
    L.added = {}
  end

  -- Where flows wait is written in the end: removals and placements of each node in one call.
  function L.flush_places()
    local gone, placed = {}, {}
    for id, flow in pairs(flows) do
      if flow and flow.score then
        local moved = flow.suffix ~= flow.stored_suffix or flow.rank ~= flow.stored_rank
        if moved or flow.score ~= flow.stored_score then
          if flow.stored_suffix and moved then
            local name = flow.queue .. '|' .. flow.stored_suffix
            gone[name] = gone[name] or {}
            gone[name][#gone[name] + 1] = flow.stored_rank .. ' ' .. id
          end
          if flow.suffix then
            local name = flow.queue .. '|' .. flow.suffix
            local list = placed[name]
            if not list then
              list = {}
              placed[name] = list
            end
            list[#list + 1] = format('%d', flow.score)
            list[#list + 1] = flow.rank .. ' ' .. id
          end
          if moved then flow.changed = true end
          flow.stored_suffix, flow.stored_rank, flow.stored_score = flow.suffix, flow.rank, flow.score
        end
      elseif flow and flow.stored_suffix and not flow.suffix then
        local name = flow.queue .. '|' .. flow.stored_suffix
        gone[name] = gone[name] or {}
        gone[name][#gone[name] + 1] = flow.stored_rank .. ' ' .. id
        flow.stored_suffix, flow.stored_rank, flow.changed = nil, nil, true
      end
    end
    for name, list in pairs(gone) do call_in_parts('ZREM', P .. 'n:' .. name, list) end
    for name, list in pairs(placed) do
      call_in_parts('ZADD', P .. 'n:' .. name, list)
      expire(P .. 'n:' .. name, L.ttl)
    end
  end

  local function flush_flows()
    for id, flow in pairs(flows) do
      if flow then
        if flow.popped > 0 then
          redis.call('ZREMRANGEBYRANK', P .. 'f:' .. id, '0', format('%d', flow.popped - 1))
          flow.popped, flow.heads, flow.read_to_end = 0, nil, nil
        end
        if flow.n == 0 then
          if flow.gone then L.write('f', id, false) end
          flows[id] = nil
        elseif flow.changed then
          if flow.hour ~= hour then
            expire(P .. 'f:' .. id, L.ttl)
            flow.hour = hour
          end
          L.write('f', id, format('%d %s %s %s %d %d %s %s %s;%s', flow.n, hour, flow.suffix or '-', flow.rank or '-', flow.tag, flow.weight, flow.tenant,
            table.concat(flow.suffixes, '+'), units_text(flow), flow.own_text))
          flow.changed = false
        end
      end
    end
  end

  local function flush_nodes()
    for name, node in pairs(nodes) do
      if node.changed then
        node.changed = false
        if node.n == 0 then
          L.write('u', 'n ' .. name, false)
          node.v = 0
          if node.shared then -- nobody is left to be fair to
            redis.call('DEL', P .. 'g:' .. name)
            node.tags, node.new_tags = nil, nil
          end
        else
          L.write('u', 'n ' .. name, format('%d %d %s', node.n, node.v, units_text(node)))
        end
      end
      if node.new_tags then
        local list, gone = {}, {}
        for tenant, tag in pairs(node.new_tags) do
          if tag > node.v then
            list[#list + 1] = format('%d', tag)
            list[#list + 1] = tenant
          else
            gone[#gone + 1] = tenant -- it was above V before it was taken back
          end
        end
        call_in_parts('ZREM', P .. 'g:' .. name, gone)
        redis.call('ZREMRANGEBYSCORE', P .. 'g:' .. name, '-inf', format('%d', node.v))
        if list[1] then
          call_in_parts('ZADD', P .. 'g:' .. name, list)
          expire(P .. 'g:' .. name, L.ttl)
        end
        node.new_tags = nil
      end
    end
  end

  local function flush_dues()
    for queue, suffixes in pairs(dues_changed) do
      local list, gone = {}, {}
      for suffix in pairs(suffixes) do
        local time = dues[queue][suffix]
        if time then
          list[#list + 1] = format('%d', time)
          list[#list + 1] = suffix
        else
          gone[#gone + 1] = suffix
        end
        dues_changed[queue] = nil
      end
      if list[1] then
        call_in_parts('ZADD', P .. 'd:' .. queue, list)
        expire(P .. 'd:' .. queue, L.ttl)
      end
      call_in_parts('ZREM', P .. 'd:' .. queue, gone)
    end
  end

  local function flush_hash(key)
    local values, set, n, gone = fields[key], {}, 0, {}
    for field in pairs(written[key]) do
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
    written[key] = {}
  end

  -- flush writes what has changed. It may be called more than once.
  function L.flush()
    L.flush_added()
    L.flush_places()
    flush_flows()
    flush_nodes()
    flush_dues()
    local renew = L.count > 0 and L.renewed ~= hour
    if L.line_changed or renew then
      L.renewed, L.line_changed, L.renew = hour, false, renew or L.renew
      L.write('u', 'line', format('%d %d %d %s', L.rank, L.front, L.limits_at, hour))
    end
    for key, changed in pairs(written) do
      if next(changed) then flush_hash(key) end
    end
    if L.count <= 0 then
      local keys = {P .. 'q', P .. 't', P .. 'f', P .. 'u', P .. 'z'}
      for name in pairs(L.queues) do keys[#keys + 1] = P .. 'd:' .. name end
      redis.call('DEL', unpack(keys))
    elseif L.count ~= L.before then
      redis.call('SET', P .. 'q', format('%d', L.count), 'EX', L.ttl)
    end
    L.before = L.count
    if renew and L.count > 0 then
      expire(P .. 't', L.ttl)
      expire(P .. 'f', L.ttl)
      expire(P .. 'u', L.ttl)
    end
  end

  -- finish writes the queues' records too: last, as they hold the appointments.
  function L.finish()
    if not L.queues then return end
    L.flush()
    if L.count <= 0 then return end
    local list, gone = {}, {}
    for name, q in pairs(L.queues) do
      if q.n == 0 and dead(q) then
        gone[#gone + 1] = name
        redis.call('DEL', P .. 'd:' .. name)
      elseif q.changed then
        list[#list + 1] = name
        list[#list + 1] = format('%d %d %d %d %d %s', q.asked, q.n, q.weights, q.first, q.last, q.with == '=' .. name and '-' or q.with)
      end
    end
    call_in_parts('HSET', P .. 'z', list)
    call_in_parts('HDEL', P .. 'z', gone)
    if L.renew then expire(P .. 'z', L.ttl) end
  end

  return L
end
end
