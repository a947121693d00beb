-- line_order.lua: who goes first at a scope: queues and classes.
--
-- A side is the tickets of one class in one queue. The sides that wait at a scope share it by
-- start-time fair queueing (line_fair.lua): the least tag goes first, and a grant moves its side's
-- tag by its part of the scope's tightest window over the side's weight. The weights of the sides
-- that wait sum up to 1. Of that batches get BatchShare, and live tickets the rest. Servers share it
-- by the weights of their flows that wait there, and the queues of a server by their priorities.
-- Queues of strict priorities have one tag together, and the most important one goes first.
--
-- A side that begins to wait starts at V, the least tag of those that wait. A batch starts one
-- ticket later, so that live tickets go first.
--
-- Of the sides of a take, the least tag at ROOT is served. While it waits for a window, no side
-- behind it passes. For a side of another server room is left if that is about to ask: it has an
-- appointment now, or its ticket fits later. For slots only an appointment counts, as nobody knows
-- when one is free. A side that is LATE holds up nobody, and gets no credit.
--
-- Where no live ticket waits, tickets of a batch are spread over windows of at most PACED. So a live
-- one finds room soon. Longer windows are used up as they are.
--
-- Key, behind the prefix P of the policy:
--   s:SUFFIX   "V time side=tag ...": the tags from V on, and when the next ticket of a batch goes (us)
--
-- new_order(L, names, strict) -> O; names are the sides of a take, none for a newcomer
--   at(flow, scope) -> room    what the flow has to leave to others, or nil:
--                              {reserved, lapses, held}: units until `lapses`; until `held` it waits,
--                              whether or not it fits
--   first(list) -> i, share    which of these sides goes first at ROOT, and its share of the grants
--   moved(suffix)              has the scope looked at again: a flow began to wait there
--   charge(flow, list, costs)  counts a grant; list: the flow's scopes
--   write()                    writes the tags that have moved
--   root                       stands for ROOT where tickets wait for slots only

local function new_order(L, names, strict)
  local SHARE = 0.05     -- of Policy.BatchShare: Go writes that of the policy here
  local LATE = 20000     -- us
  local PACED = 60000000 -- us
  local BURST = 100000   -- us by which tickets of a batch may go before their time
  local SLOT = 100000    -- the part of a slot
  local KEPT = 60000     -- ms for which tags are kept, at least
  local LIVE, BATCH = 1, 2

  local call, fair, places = L.call, once(new_fair, L), once(new_places, L)
  local P, now, ROOT = call.P, call.now, windows.ROOT
  local O = {root = {suffix = ROOT, of = {windows = {}}}}
  local mine, sides, turns, servers = {}, {}, {}, {}
  for i = 1, #names do mine[names[i]] = true end
  for name, q in pairs(L.queues) do
    local late = now - LATE
    local asks = q.first > late and q.first or q.last > late and q.last
    if q.n > 0 and (mine[name] or asks and L.alive(q)) then
      sides[#sides + 1] = {q = q, own = mine[name], asks = asks}
      servers[q.server] = true
    end
  end
  table.sort(sides, function(a, b) return a.q.queue < b.q.queue end) -- equal tags go by name
  local many_servers = next(servers, next(servers)) ~= nil

  local function part_of(scope, costs)
    local part = fair.part_of(scope, costs)
    return part > 0 and part or SLOT
  end

  -- due_at tells when a side's flows at a scope may fit; nil if none waits there. Those of another
  -- server that fit everywhere wait at ROOT, and want room of all scopes.
  local function due_at(side, suffix)
    local due = places.due_at(side.q.queue, suffix)
    return due or not side.own and places.due_at(side.q.queue, ROOT) or nil
  end

  -- lapses tells until when room is left to a side of another server, 0 if it is not.
  local function lapses(scope, side, due)
    local list, slots = scope.of.windows, false
    for j = 1, #list do slots = slots or call.windows[list[j]].algorithm.release end
    if due > now and not slots then return due + LATE end
    return side.asks <= now + LATE and side.asks + LATE or 0
  end

  -- new_entry returns what a side has waiting at a scope, or nil.
  local function new_entry(side, flow, scope)
    local suffix, of = scope.suffix, nil
    local due = due_at(side, suffix)
    if not due then return nil end
    if call.only_tenants and scope.of.of_tenant then
      of = L.flow_of(side.q.queue .. flow.values)
    else
      of = L.node_of(side.q.queue, suffix)
    end
    if not of or of.n == 0 or of.suffix ~= suffix and of.suffix ~= ROOT then return nil end
    return {
      side = side, of = of, tag = false, weight = 1, step = false,
      class = side.q.batch and BATCH or LIVE, units = false,
      lapses = side.own and 0 or lapses(scope, side, due),
    }
  end

  -- mean_costs sets what a mean ticket of an entry costs, by unit, and moves its tag by.
  local function mean_costs(turn, e)
    local costs, list = {}, turn.scope.of.windows
    e.units = {}
    for j = 1, #list do
      local unit = call.windows[list[j]].unit
      e.units[unit] = ceil(line_units.of_unit(e.of, unit) / max(1, e.of.n))
      costs[list[j]] = e.units[unit]
    end
    e.step = max(1, ceil(part_of(turn.scope, costs) / e.weight))
  end

  -- flows_weight returns the weight of a side's flows that wait at a scope, or at ROOT if none does.
  local function flows_weight(q, suffix)
    local flows = redis.call('ZCARD', P .. 'n:' .. q.queue .. '|' .. suffix)
    if flows == 0 then flows = redis.call('ZCARD', P .. 'n:' .. q.queue .. '|' .. ROOT) end
    return max(1, flows * q.weights / max(1, q.flows))
  end

  -- weigh sets the weights of all entries. At a tenant's own scope servers weigh the same.
  local function weigh(turn)
    local list, servers_of, flows = turn.list, {{}, {}}, {0, 0}
    local alike = turn.scope.of.of_tenant or not many_servers
    for k = 1, #list do
      local e, q = list[k], list[k].side.q
      local server = servers_of[e.class][q.server] or {priorities = 0, flows = 0}
      local weight = server.flows == 0 and 1 or 0
      if not alike then weight = flows_weight(q, turn.scope.suffix) end
      server.priorities, server.flows = server.priorities + q.priority, server.flows + weight
      flows[e.class] = flows[e.class] + weight
      servers_of[e.class][q.server], e.server = server, server
    end
    turn.both = flows[LIVE] > 0 and flows[BATCH] > 0
    for k = 1, #list do
      local e = list[k]
      local weight = e.server.flows / flows[e.class]
      if not (strict and e.side.own) then weight = weight * e.side.q.priority / e.server.priorities end
      if turn.both then weight = weight * (e.class == BATCH and SHARE or 1 - SHARE) end
      e.weight, e.step = weight, false
    end
  end

  -- begin sets the tags of entries that had none. Where live tickets begin to wait, batches go later.
  local function begin(turn)
    local joint, live_waited = {turn.v, turn.v}, false
    for k = 1, #turn.list do
      local e = turn.list[k]
      e.tag = e.tag or turn.tags[e.side.q.queue] or -1
      if e.class == LIVE and e.tag >= turn.v then live_waited = true end
    end
    for k = 1, #turn.list do
      local e = turn.list[k]
      if e.class == BATCH and turn.both and (e.tag < turn.v or not live_waited) then
        mean_costs(turn, e)
        e.tag = max(e.tag, turn.v + e.step)
      end
      e.tag = max(e.tag, turn.v)
      if e.side.own then joint[e.class] = max(joint[e.class], e.tag) end
    end
    for k = 1, strict and #turn.list or 0 do
      if turn.list[k].side.own then turn.list[k].tag = joint[turn.list[k].class] end
    end
  end

  local function add(turn, e)
    turn.list[#turn.list + 1] = e
    turn.of[e.side.q.queue] = e
  end

  -- look reads which sides wait at the scope of a turn, and its record, unless one waits there alone.
  local function look(turn, flow)
    turn.stale = false
    for k = 1, #sides do
      local e = not turn.of[sides[k].q.queue] and new_entry(sides[k], flow, turn.scope)
      if e then add(turn, e) end
    end
    local first = turn.list[1]
    if not flow.batch and (not first or not turn.list[2] and first.side.q.queue == flow.queue) then return end
    if not turn.of[flow.queue] then -- a newcomer, or a side whose flows wait at ROOT
      add(turn, {
        side = {q = L.queue_of(flow.queue), own = true}, of = flow, tag = false, weight = 1, step = false,
        class = flow.batch and BATCH or LIVE, units = false, lapses = 0,
      })
    end
    if not turn.shared then
      turn.shared = true
      local text = redis.call('GET', P .. 's:' .. turn.scope.suffix)
      if text then
        local v, time = match(text, '^(%d+) (%d+)')
        turn.v, turn.time = v + 0, time + 0
        for name, tag in gmatch(text, '([^ =]*)=(%d+)') do turn.tags[name] = tag + 0 end
      end
    end
    weigh(turn)
    begin(turn)
  end

  -- alone tells whether a flow's side is the only one at a narrow scope. That is quick to see where no
  -- flow of its server waits at one, and no other server asks.
  local function alone(flow, suffix)
    if flow.batch or suffix == ROOT or many_servers then return false end
    for k = 1, #sides do
      local side = sides[k]
      if side.narrow == nil then
        local at_root = places.due_at(side.q.queue, ROOT) and 1 or 0
        side.narrow = redis.call('ZCARD', P .. 'd:' .. side.q.queue) > at_root
      end
      if side.narrow and side.q.queue ~= flow.queue and places.due_at(side.q.queue, suffix) then return false end
    end
    return true
  end

  -- turn_of returns what is known of the sides at a scope, and the entry of a flow's side; nil if that
  -- waits there alone. The time of a batch counts there also if it is alone.
  local function turn_of(flow, scope)
    local turn = turns[scope.suffix]
    if not turn then
      if turn == false or alone(flow, scope.suffix) then
        turns[scope.suffix] = false
        return nil
      end
      turn = {
        scope = scope, list = {}, of = {}, tags = {}, v = 0, time = 0, both = false, changed = false,
        stale = true, shared = false,
      }
      turns[scope.suffix] = turn
    end
    if turn.stale or turn.shared and not turn.of[flow.queue] then look(turn, flow) end
    if turn.shared then return turn, turn.of[flow.queue] end
    return nil
  end

  -- waits tells whether an entry's side waits at the scope now. A tenant's flow that had room there in
  -- this call, and waits at ROOT by now, still wants it.
  local function waits(turn, e)
    local suffix = turn.scope.suffix
    return e.of.n > 0 and (not e.side.own or places.due_at(e.side.q.queue, suffix) or
      suffix ~= ROOT and e.of.opened and e.of.suffix == ROOT)
  end

  local function goes_before(e, own)
    if e.tag ~= own.tag then return e.tag < own.tag end
    if e.class ~= own.class then return e.class < own.class end
    return strict and e.side.own and e.side.q.priority > own.side.q.priority
  end

  -- leave_room adds what a flow leaves to an entry that goes before it.
  local function leave_room(room, turn, e, own)
    local lapses = e.lapses
    if e.side.own then
      local due = places.due_at(e.side.q.queue, turn.scope.suffix)
      if due and due > now then
        room.held = max(room.held or 0, due)
        return
      end
      lapses = turn.scope.suffix ~= ROOT and now + LATE or 0 -- at ROOT it has gone already
    end
    if lapses == 0 then return end
    if not e.step then mean_costs(turn, e) end
    local n = min(e.of.n, max(1, ceil((own.tag - e.tag) / e.step)))
    for unit, cost in pairs(e.units) do room.reserved[unit] = (room.reserved[unit] or 0) + n * cost end
    room.lapses = min(room.lapses, lapses)
  end

  function O.at(flow, scope)
    if not sides[2] and not flow.batch then return nil end
    local turn, own = turn_of(flow, scope)
    if not turn then return nil end
    local room, live = nil, false
    for k = 1, #turn.list do
      local e = turn.list[k]
      if e ~= own then
        local before = goes_before(e, own)
        if (before or own.class == BATCH and e.class == LIVE) and waits(turn, e) then
          live = live or e.class == LIVE
          if before then
            room = room or {reserved = {}, lapses = MOST, held = nil}
            leave_room(room, turn, e, own)
          end
        end
      end
    end
    if own.class == BATCH and not live and turn.time > now + BURST then
      room = room or {reserved = {}, lapses = MOST, held = nil}
      room.held = max(room.held or 0, turn.time - BURST)
    end
    return room
  end

  function O.moved(suffix)
    if turns[suffix] then
      turns[suffix].stale = true
    elseif turns[suffix] == false then
      turns[suffix] = nil
    end
    for k = 1, suffix ~= ROOT and #sides or 0 do sides[k].narrow = true end
  end

  function O.first(list)
    local best, first
    for i = 1, #list do
      local q, turn, e = list[i], turns[ROOT], nil
      if turn and turn.shared and not turn.stale then e = turn.of[q.queue] end
      if not e then
        local scope = call.numbers[''] and scopes.open(call, ROOT, call.numbers[''], nil) or O.root
        turn, e = turn_of({queue = q.queue, values = '', batch = q.batch, n = q.n}, scope)
      end
      if not best or e and first and goes_before(e, first) then best, first = i, e end
    end
    return best, first and first.weight or 1
  end

  local function spread(scope, i, units)
    local st = scope.states[i]
    if not st.period or st.period > PACED then return nil end
    return units * st.period / st.limit
  end

  local function charge_at(flow, scope, costs)
    local turn, own = turn_of(flow, scope)
    if not turn then return end
    local list, v = turn.list, own.tag
    for k = 1, #list do
      if list[k].tag < v and waits(turn, list[k]) then v = list[k].tag end
    end
    turn.v, turn.changed = max(turn.v, v), true
    own.tag = own.tag + max(1, ceil(part_of(scope, costs.windows) / own.weight))
    for k = 1, strict and #list or 0 do
      if list[k].side.own and list[k].class == own.class then list[k].tag = own.tag end
    end
    if own.class == LIVE then return end
    local of, longest = scope.of.windows, 0
    for j = 1, #of do longest = max(longest, spread(scope, of[j], costs.windows[of[j]]) or 0) end
    if longest > 0 then turn.time = ceil(max(turn.time, now) + longest) end
  end

  function O.charge(flow, list, costs)
    if not sides[2] and not flow.batch then return end
    for s = 1, #list do charge_at(flow, list[s], costs) end
    if not call.numbers[''] then charge_at(flow, O.root, costs) end
  end

  -- write_turn writes the tags at a scope, and keeps them until its windows are empty.
  local function write_turn(suffix, turn)
    local tags, words, lasts = turn.tags, {format('%d %d', turn.v, turn.time)}, now
    for name, e in pairs(turn.of) do tags[name] = e.tag end
    for name, tag in pairs(tags) do
      if tag >= turn.v then words[#words + 1] = format('%s=%d', name, tag) end
    end
    local of = turn.scope.of.windows
    for j = 1, #of do
      lasts = max(lasts, call.windows[of[j]].algorithm.resets_at(turn.scope.states[of[j]], now))
    end
    local ms = format('%d', max(KEPT, ceil((lasts - now) / 1000)))
    redis.call('SET', P .. 's:' .. suffix, concat(words, ' '), 'PX', ms)
  end

  function O.write()
    for suffix, turn in pairs(turns) do
      if turn and turn.changed then write_turn(suffix, turn) end
    end
  end

  return O
end
