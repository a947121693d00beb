-- line_order.lua: who goes first at a scope: queues and classes.
--
-- A side is the tickets of one class in one queue. docs/explanation/line.md says how sides share a
-- scope, and how a batch is spread. Besides:
--
-- A side that begins to wait starts at V, the least tag of those that wait. A batch starts one
-- ticket later, so that live tickets go first.
--
-- Of the sides of a take, the least tag at ROOT is served. While it waits for a window, no side
-- behind it passes. For a side of another server room is left if that is about to ask: it has an
-- appointment now, or its ticket fits later. For slots only an appointment counts, as nobody knows
-- when one is free. A side that is LATE holds up nobody, and gets no credit.
--
-- A batch that live tickets delay at a broader scope keeps its time at narrower ones.
--
-- Key, behind the prefix P of the policy:
--   s:SUFFIX   "V time mixed side=tag ...": the tags from V on, when the next ticket of a batch goes (us),
--              and 1 if both classes waited at the last grant
--
-- new_order(L, names, strict) returns a table of functions; names are the sides of a take, none for a
-- newcomer. What is known of a scope is a turn: the entries of the sides that wait there, by queue
-- and in a list, V, the next batch's time, and the tags that were kept.

local function new_order(L, names, strict)
  local LATE = 20000     -- us
  local PACED = 60000000 -- us
  local BURST = 100000   -- us by which tickets of a batch may go before their time
  local TAGS_MS = 60000  -- for which tags are kept, at least
  local LIVE, BATCH = 1, 2

  local call, fair, places = L.call, once(new_fair, L), once(new_places, L)
  local P, now = call.P, call.now
  local order = { -- root: the scope that all share, even if it has no window
    root = call.numbers[''] and scopes.open(call, ROOT, call.numbers[''], nil) or {suffix = ROOT, of = {windows = {}}},
  }
  local asked, sides, turns, servers = {}, {}, {}, {}
  for i = 1, #names do asked[names[i]] = true end
  for name, q in pairs(L.queues) do
    local late = now - LATE
    local asks = q.first > late and q.first or q.last > late and q.last
    if q.n > 0 and (asked[name] or asks and L.alive(q)) then
      sides[#sides + 1] = {q = q, mine = asked[name], asks = asks}
      servers[q.server] = true
    end
  end
  table.sort(sides, function(a, b) return a.q.queue < b.q.queue end) -- equal tags go by name
  local many_servers = next(servers, next(servers)) ~= nil
  local narrow = false -- whether tickets may wait at other scopes than ROOT
  for k = 1, #sides do
    local q, mine = sides[k].q, sides[k].mine
    local at_root = mine and places.due_at(q.queue, ROOT) and 1 or 0
    narrow = narrow or not mine or redis.call('ZCARD', P .. q.dues_key) > at_root
  end

  -- add adds the entry of a side to a turn. tickets: the flow or node that counts what waits; lapses:
  -- until when room is left to a side of another server, 0 if it is not. Queues of strict priorities
  -- have one account, that is one tag.
  local function add(turn, side, tickets, lapses)
    local class = side.q.batch and BATCH or LIVE
    local account = strict and side.mine and turn.strict[class] or {tag = -1}
    local e = {
      side = side, tickets = tickets, account = account, weight = 1, step = false, units = false,
      class = class, lapses = lapses,
    }
    turn.list[#turn.list + 1] = e
    turn.entries[side.q.queue] = e
  end

  -- add_waiting adds a side's entry if it has tickets waiting at the turn's scope. Those of another
  -- server that fit everywhere wait at ROOT, and want room of all scopes.
  local function add_waiting(turn, side, flow)
    local scope, name, mine = turn.scope, side.q.queue, side.mine
    local suffix = scope.suffix
    local due = places.due_at(name, suffix) or not mine and places.due_at(name, ROOT)
    if not due then return end
    local tickets = L.tickets_at(name, scope, flow)
    if not tickets or tickets.n == 0 or tickets.suffix ~= suffix and tickets.suffix ~= ROOT then return end
    local list, slots, lapses = scope.of.windows, false, 0
    for j = 1, #list do slots = slots or call.windows[list[j]].algorithm.release end
    if not mine and due > now and not slots then
      lapses = due + LATE
    elseif not mine and side.asks <= now + LATE then
      lapses = side.asks + LATE
    end
    add(turn, side, tickets, lapses)
  end

  -- mean_costs sets what a mean ticket of an entry costs, by unit, and moves its tag by.
  local function mean_costs(turn, e)
    local costs, list = {}, turn.scope.of.windows
    e.units = {}
    for j = 1, #list do
      local unit = call.windows[list[j]].unit
      e.units[unit] = ceil(line_units.of_unit(e.tickets, unit) / max(1, e.tickets.n))
      costs[list[j]] = e.units[unit]
    end
    e.step = max(1, ceil(fair.part_of(turn.scope, costs) / e.weight))
  end

  -- flows_weight returns the weight of a side's flows that wait at a scope, or at ROOT if none does.
  local function flows_weight(q, suffix)
    local flows = redis.call('ZCARD', P .. 'n:' .. q.queue .. '|' .. suffix)
    if flows == 0 then flows = redis.call('ZCARD', P .. 'n:' .. q.key) end
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
      if not (strict and e.side.mine) then weight = weight * e.side.q.priority / e.server.priorities end
      if turn.both then weight = weight * (e.class == BATCH and call.batch_share or 1 - call.batch_share) end
      e.weight, e.step, e.account.tag = weight, false, -1
    end
  end

  -- begin sets the tags of entries that had none. Where live tickets begin to wait, all batches go later.
  local function begin(turn)
    local list, tags, v = turn.list, turn.tags, turn.v
    for name in pairs(tags) do
      if turn.both and not turn.mixed and byte(name, -1) == 33 then tags[name] = nil end
    end
    for k = 1, #list do
      local account = list[k].account
      account.tag = max(account.tag, tags[list[k].side.q.queue] or -1)
    end
    for k = 1, #list do
      local e, account = list[k], list[k].account
      if e.class == BATCH and turn.both and account.tag < v then
        mean_costs(turn, e)
        account.tag = v + e.step
        tags[e.side.q.queue] = account.tag
      end
      account.tag = max(account.tag, v)
    end
  end

  -- read_turn reads which sides wait at the scope of a turn, and its record, unless one waits there alone.
  local function read_turn(turn, flow)
    turn.stale = false
    for k = 1, #sides do
      if not turn.entries[sides[k].q.queue] then add_waiting(turn, sides[k], flow) end
    end
    local first = turn.list[1]
    if not flow.batch and (not first or not turn.list[2] and first.side.q.queue == flow.queue) then return end
    if not turn.entries[flow.queue] then -- a newcomer, or a side whose flows wait at ROOT
      add(turn, {q = L.queue_of(flow.queue), mine = true}, flow, 0)
    end
    if not turn.shared then
      turn.shared = true
      local text = redis.call('GET', P .. 's:' .. turn.scope.suffix)
      if text then
        local v, time, mixed = match(text, '^(%d+) (%d+) (%d)')
        turn.v, turn.time, turn.mixed = v + 0, time + 0, mixed == '1'
        for name, tag in gmatch(text, '([^ =]*)=(%d+)') do turn.tags[name] = tag + 0 end
      end
    end
    weigh(turn)
    begin(turn)
  end

  -- turn_of returns the turn of a scope, and the entry of a flow's side; nil if that waits there alone.
  -- The time of a batch counts there also if it is alone.
  local function turn_of(flow, scope)
    if not narrow and scope.suffix ~= ROOT and not flow.batch then return nil end
    local turn = turns[scope.suffix]
    if not turn then
      turn = {
        scope = scope, list = {}, entries = {}, tags = {}, v = 0, time = 0, both = false, mixed = false, changed = false,
        stale = true, shared = false, strict = {{tag = -1}, {tag = -1}},
      }
      turns[scope.suffix] = turn
    end
    if turn.stale or turn.shared and not turn.entries[flow.queue] then read_turn(turn, flow) end
    if turn.shared then return turn, turn.entries[flow.queue] end
    return nil
  end

  -- waits tells whether an entry's side waits at the scope now. A tenant's flow that had room there in
  -- this call, and waits at ROOT by now, still wants it.
  local function waits(turn, e)
    local suffix = turn.scope.suffix
    return e.tickets.n > 0 and (not e.side.mine or places.due_at(e.side.q.queue, suffix) or
      suffix ~= ROOT and e.tickets.opened and e.tickets.suffix == ROOT)
  end

  local function goes_before(a, b)
    if a.account.tag ~= b.account.tag then return a.account.tag < b.account.tag end
    if a.class ~= b.class then return a.class < b.class end
    return strict and a.side.mine and a.side.q.priority > b.side.q.priority
  end

  -- leave_room adds to a room what a flow whose side has the tag leaves to an entry that goes before.
  local function leave_room(room, turn, e, tag)
    local lapses = e.lapses
    if e.side.mine then
      local due = places.due_at(e.side.q.queue, turn.scope.suffix)
      if due and due > now then -- a batch that waits for its time holds up nobody
        local held = min(due, now + appointments.LATEST) -- its server may have gone by then
        if e.class == LIVE or turn.time <= now + BURST then room.held = max(room.held or 0, held) end
        return
      end
      lapses = turn.scope.suffix ~= ROOT and now + LATE or 0 -- at ROOT it has gone already
    end
    if lapses == 0 then return end
    if not e.step then mean_costs(turn, e) end
    local n = min(e.tickets.n, max(1, ceil((tag - e.account.tag) / e.step)))
    for unit, cost in pairs(e.units) do room.reserved[unit] = (room.reserved[unit] or 0) + n * cost end
    room.lapses = min(room.lapses, lapses)
  end

  -- owed returns what the flow has to leave to others at a scope, or nil: {reserved, lapses, held}, units
  -- until `lapses`, and until `held` it waits whether or not it fits.
  function order.owed(flow, scope)
    if not sides[2] and not flow.batch then return nil end
    local turn, mine = turn_of(flow, scope)
    if not turn then return nil end
    local room, live = nil, false
    for k = 1, #turn.list do
      local e = turn.list[k]
      local before = e ~= mine and goes_before(e, mine)
      if (before or mine.class == BATCH and e.class == LIVE) and waits(turn, e) then
        live = live or e.class == LIVE
        if before then
          room = room or {reserved = {}, lapses = MOST, held = nil}
          leave_room(room, turn, e, mine.account.tag)
        end
      end
    end
    if mine.class == BATCH and not live and turn.time > now + BURST then
      room = room or {reserved = {}, lapses = MOST, held = nil}
      room.held = max(room.held or 0, turn.time - BURST)
    end
    return room
  end

  -- moved notes that a flow began to wait at this scope.
  function order.moved(suffix)
    narrow = narrow or suffix ~= ROOT
    if turns[suffix] then turns[suffix].stale = true end
  end

  -- first returns which of these queues goes first at ROOT, and its share of the grants.
  function order.first(list)
    local turn, first = turn_of(list[1], order.root)
    local best = 1
    for i = 2, turn and #list or 1 do
      local e = turn.entries[list[i].queue]
      if e and goes_before(e, first) then best, first = i, e end
    end
    return best, first and first.weight or 1
  end

  -- charge_at counts a grant at a scope. late: for how long live tickets at broader scopes may have delayed
  -- a batch. It returns that for narrower ones.
  local function charge_at(flow, scope, costs, late)
    local turn, mine = turn_of(flow, scope)
    if not turn then return late end
    local list, account, live = turn.list, mine.account, false
    local v = account.tag
    for k = 1, #list do
      local e = list[k]
      if (e.account.tag < v or flow.batch and e.class == LIVE) and waits(turn, e) then
        v, live = min(v, e.account.tag), live or e.class == LIVE
      end
    end
    turn.v, turn.mixed, turn.changed = max(turn.v, v), turn.both and (live or mine.class == LIVE), true
    account.tag = account.tag + max(1, ceil(fair.part_of(scope, costs.windows) / mine.weight))
    turn.tags[flow.queue] = account.tag
    if mine.class == LIVE then return 0 end
    local longest, until_next = late, 0
    for _, i in ipairs(scope.of.windows) do
      local st = scope.states[i]
      if st.period and st.period <= PACED then
        longest = max(longest, st.period)
        until_next = max(until_next, costs.windows[i] * st.period / st.limit)
      end
    end
    if until_next > 0 then turn.time = ceil(max(turn.time, now - late) + until_next) end
    return live and longest or late
  end

  -- charge counts a grant at the flow's scopes.
  function order.charge(flow, list, costs)
    if not sides[2] and not flow.batch then return end
    local late = call.numbers[''] and 0 or charge_at(flow, order.root, costs, 0)
    for s = #list, 1, -1 do late = charge_at(flow, list[s], costs, late) end
  end

  -- write writes the tags that have moved. They are kept until the scope's windows are empty.
  function order.write()
    for suffix, turn in pairs(turns) do
      if turn.changed then
        local tags, words, lasts = turn.tags, {format('%d %d %d', turn.v, turn.time, turn.mixed and 1 or 0)}, now
        for name, e in pairs(turn.entries) do tags[name] = e.account.tag end
        for name, tag in pairs(tags) do
          if tag >= turn.v then words[#words + 1] = format('%s=%d', name, tag) end
        end
        for _, i in ipairs(turn.scope.of.windows) do
          lasts = max(lasts, call.windows[i].algorithm.resets_at(turn.scope.states[i], now))
        end
        local ms = format('%d', max(TAGS_MS, ceil((lasts - now) / 1000)))
        redis.call('SET', P .. 's:' .. suffix, concat(words, ' '), 'PX', ms)
      end
    end
  end

  return order
end
