-- line_order.lua: who goes first at a scope: queues and classes.
--
-- A side is the tickets of one class in one queue. docs/explanation/line.md explains how sides share a scope.
-- A side that begins to wait starts at V, the least tag there; a batch starts one ticket after V if live sides wait.
--
-- A take serves its side with the least tag at ROOT; while that side waits for a window, no other is served. A take
-- also leaves room for a side of another server that goes first. If its ticket does not fit yet, and no window has
-- leases, that room lapses LATE after the ticket fits; else it is kept from LATE before the side's appointment to LATE
-- after. If live tickets delay a batch at a scope, it catches up at narrower scopes: see note_grant_at.
--
-- Key, after the prefix P of the policy:
--   s:SUFFIX   "V time mixed side=tag ...": `time` is when the next ticket of a batch goes (us), `mixed` is 1
--              if both classes waited at the last grant; then the tags from V on
--
-- new_order(L, names, strict) returns a table of functions; names are the sides of a take, none for a reserve. The
-- standings of a scope are a row for each side that waits there, by queue and in a list; V; the time at which the
-- next ticket of a batch goes; and the tags that were kept.

local function new_order(L, names, strict)
  local LATE = 20000     -- us
  local PACED = 60000000 -- us, the longest period of windows over which batches are spread
  local BURST = 100000   -- us by which tickets of a batch may go before their time
  local TAGS_MS = 60000  -- for which tags are kept, at least
  local LIVE, BATCH = 1, 2

  local call, fair, heads = L.call, made_once(new_fair, L), made_once(new_heads, L)
  local P, now = call.P, call.now
  local order = { -- root: the scope that all share, even if it has no window
    root = call.numbers[''] and scopes.open(call, ROOT, call.numbers['']) or {suffix = ROOT, spec = {windows = {}}},
  }
  local asked_for, sides, all_standings, servers = {}, {}, {}, {}
  for i = 1, #names do asked_for[names[i]] = true end
  for name, q in pairs(L.queues) do
    local since = now - LATE
    local appointment = q.first > since and q.first or q.last > since and q.last -- the next one, or false
    if q.n > 0 and (asked_for[name] or appointment and L.alive(q)) then
      sides[#sides + 1] = {q = q, of_take = asked_for[name], appointment = appointment}
      servers[q.server] = true
    end
  end
  table.sort(sides, function(a, b) return a.q.queue < b.q.queue end) -- equal tags go by name
  local many_servers = next(servers, next(servers)) ~= nil
  local narrow = false -- whether tickets may wait at other scopes than ROOT
  for k = 1, #sides do
    local q, mine = sides[k].q, sides[k].of_take
    local at_root = mine and heads.due_at(q.queue, ROOT) and 1 or 0
    narrow = narrow or not mine or redis.call('ZCARD', P .. q.dues_key) > at_root
  end

  -- add adds the row of a side to standings. waiting: the flow or node whose n counts its tickets; lapses: until when
  -- room is kept for a side of another server, 0 if none is. Queues of strict priorities share one tag, in `account`.
  local function add(standings, side, waiting, lapses)
    local class = side.q.batch and BATCH or LIVE
    local account = strict and side.of_take and standings.strict[class] or {tag = -1}
    local row = {
      side = side, waiting = waiting, account = account, weight = 1, step = false, units = false,
      class = class, lapses = lapses,
    }
    standings.list[#standings.list + 1] = row
    standings.rows[side.q.queue] = row
  end

  -- add_waiting adds a side's row if it has tickets waiting at a scope. Another server's tickets that fit at
  -- every scope wait at ROOT, and still need room at each.
  local function add_waiting(standings, side, flow)
    local scope, name, mine = standings.scope, side.q.queue, side.of_take
    local suffix = scope.suffix
    local due = heads.due_at(name, suffix) or not mine and heads.due_at(name, ROOT)
    if not due then return end
    local waiting = L.tickets_at(name, scope, flow)
    if not waiting or waiting.n == 0 or waiting.suffix ~= suffix and waiting.suffix ~= ROOT then return end
    local list, slots, lapses = scope.spec.windows, false, 0
    for j = 1, #list do slots = slots or call.windows[list[j]].algorithm.release end
    if not mine and due > now and not slots then
      lapses = due + LATE
    elseif not mine and side.appointment <= now + LATE then
      lapses = side.appointment + LATE
    end
    add(standings, side, waiting, lapses)
  end

  -- average_costs sets what a ticket of a row costs on average, by unit, and by how much it raises the tag.
  local function average_costs(standings, row)
    local costs, list = {}, standings.scope.spec.windows
    row.units = {}
    for j = 1, #list do
      local unit = call.windows[list[j]].unit
      row.units[unit] = ceil(line_units.of_unit(row.waiting, unit) / max(1, row.waiting.n))
      costs[list[j]] = row.units[unit]
    end
    row.step = fair.part_of(standings.scope, costs) / row.weight
  end

  -- weigh sets the weights of all rows, and clears their tags. A side weighs as much as its flows that wait at the
  -- scope, or at ROOT if none waits there. At a tenant's own scope servers weigh the same.
  local function weigh(standings)
    local list, servers_of, weights = standings.list, {{}, {}}, {0, 0}
    local alike = standings.scope.spec.of_tenant or not many_servers
    for k = 1, #list do
      local row, q = list[k], list[k].side.q
      local server = servers_of[row.class][q.server] or {priorities = 0, weight = 0}
      local weight = server.weight == 0 and 1 or 0 -- 1 for each server
      if not alike then
        local flows = L.count_flows(q.queue .. '|' .. standings.scope.suffix)
        if flows == 0 then flows = L.count_flows(q.key) end
        weight = max(1, flows * q.weights / max(1, q.flows))
      end
      server.priorities, server.weight = server.priorities + q.priority, server.weight + weight
      weights[row.class] = weights[row.class] + weight
      servers_of[row.class][q.server], row.server = server, server
    end
    standings.both = weights[LIVE] > 0 and weights[BATCH] > 0
    for k = 1, #list do
      local row = list[k]
      local weight = row.server.weight / weights[row.class]
      if not (strict and row.side.of_take) then weight = weight * row.side.q.priority / row.server.priorities end
      if standings.both then weight = weight * (row.class == BATCH and call.batch_share or 1 - call.batch_share) end
      row.weight, row.step, row.account.tag = weight, false, -1
    end
  end

  -- begin sets the tags of rows to the kept tags, but at least V. Batches lose their tags where live tickets are new.
  local function begin(standings)
    local list, tags, v = standings.list, standings.tags, standings.v
    for name in pairs(tags) do
      if standings.both and not standings.mixed and byte(name, -1) == 33 then tags[name] = nil end
    end
    for k = 1, #list do
      local account = list[k].account
      account.tag = max(account.tag, tags[list[k].side.q.queue] or -1)
    end
    for k = 1, #list do
      local row, account = list[k], list[k].account
      if row.class == BATCH and standings.both and account.tag < v then
        average_costs(standings, row)
        account.tag = v + row.step
        tags[row.side.q.queue] = account.tag
      end
      account.tag = max(account.tag, v)
    end
  end

  -- read_standings reads which sides wait at a scope, and the scope's record, unless only one side waits there.
  local function read_standings(standings, flow)
    standings.stale = false
    for k = 1, #sides do
      if not standings.rows[sides[k].q.queue] then add_waiting(standings, sides[k], flow) end
    end
    local first = standings.list[1]
    if not flow.batch and (not first or not standings.list[2] and first.side.q.queue == flow.queue) then return end
    if not standings.rows[flow.queue] then -- a newcomer, or a side whose flows wait at ROOT
      add(standings, {q = L.queue_of(flow.queue), of_take = true}, flow, 0)
    end
    if not standings.loaded then
      standings.loaded = true
      local text = redis.call('GET', P .. 's:' .. standings.scope.suffix)
      if text then
        local v, time, mixed = match(text, '^(%S+) (%d+) (%d)')
        standings.v, standings.time, standings.mixed = v + 0, time + 0, mixed == '1'
        for name, tag in gmatch(text, '([^ =]*)=(%S+)') do standings.tags[name] = tag + 0 end
      end
    end
    weigh(standings)
    begin(standings)
  end

  -- standings_of returns the standings of a scope, and the row of a flow's side; nil if that is live and waits
  -- there alone (the time of a batch counts even then).
  local function standings_of(flow, scope)
    if not narrow and scope.suffix ~= ROOT and not flow.batch then return nil end
    local standings = all_standings[scope.suffix]
    if not standings then
      standings = {
        scope = scope, list = {}, rows = {}, tags = {}, v = 0, time = 0, both = false, mixed = false, changed = false,
        stale = true, loaded = false, strict = {{tag = -1}, {tag = -1}},
      }
      all_standings[scope.suffix] = standings
    end
    if standings.stale or standings.loaded and not standings.rows[flow.queue] then read_standings(standings, flow) end
    if standings.loaded then return standings, standings.rows[flow.queue] end
  end

  -- waits returns whether a row's side waits at the scope now. A tenant's flow that had room there in this call,
  -- and waits at ROOT by now, still counts as waiting there.
  local function waits(standings, row)
    local suffix = standings.scope.suffix
    return row.waiting.n > 0 and (not row.side.of_take or heads.due_at(row.side.q.queue, suffix) or
      suffix ~= ROOT and row.waiting.passed and row.waiting.suffix == ROOT)
  end

  local function goes_before(a, b)
    if a.account.tag ~= b.account.tag then return a.account.tag < b.account.tag end
    if a.class ~= b.class then return a.class < b.class end
    return strict and a.side.of_take and a.side.q.priority > b.side.q.priority
  end

  -- reserve adds to `owed` the units of the tickets by which a row's side is ahead of a tag, until that lapses.
  local function reserve(owed, standings, row, tag, lapses)
    if not row.step then average_costs(standings, row) end
    local n = min(row.waiting.n, max(1, ceil((tag - row.account.tag) / row.step - 1e-6)))
    for unit, cost in pairs(row.units) do owed.reserved[unit] = (owed.reserved[unit] or 0) + n * cost end
    owed.lapses = min(owed.lapses, lapses)
  end

  -- owe adds to `owed` what a flow leaves to a row's side, which goes first. tag: of the flow's side.
  local function owe(owed, standings, row, tag)
    local suffix = standings.scope.suffix
    local due = row.side.of_take and heads.due_at(row.side.q.queue, suffix)
    if not row.side.of_take then
      if row.lapses > 0 then reserve(owed, standings, row, tag, row.lapses) end
    elseif due and due > now then -- it waits for room; a batch before its time delays nobody
      local time = min(due, now + appointments.LATEST) -- its server may have gone by then
      if row.class == LIVE or standings.time <= now + BURST then owed.opens = max(owed.opens or 0, time) end
    elseif suffix ~= ROOT then -- at ROOT this take visits that side before the flow
      reserve(owed, standings, row, tag, now + LATE)
    end
  end

  -- owed returns the room that the flow leaves to others at a scope, or nil: {reserved, lapses, opens}. It leaves the
  -- units `reserved` until `lapses`, and waits until `opens` whether or not its costs fit.
  function order.owed(flow, scope)
    if not sides[2] and not flow.batch then return nil end
    local standings, flow_row = standings_of(flow, scope)
    if not standings then return nil end
    local owed, live = nil, false
    for k = 1, #standings.list do
      local row = standings.list[k]
      local goes_first = row ~= flow_row and goes_before(row, flow_row)
      if (goes_first or flow_row.class == BATCH and row.class == LIVE) and waits(standings, row) then
        live = live or row.class == LIVE
        if goes_first then
          owed = owed or {reserved = {}, lapses = MOST, opens = nil}
          owe(owed, standings, row, flow_row.account.tag)
        end
      end
    end
    if flow_row.class == BATCH and not live and standings.time > now + BURST then
      owed = owed or {reserved = {}, lapses = MOST, opens = nil}
      owed.opens = max(owed.opens or 0, standings.time - BURST)
    end
    return owed
  end

  -- moved notes that a flow began to wait at this scope.
  function order.moved(suffix)
    narrow = narrow or suffix ~= ROOT
    if all_standings[suffix] then all_standings[suffix].stale = true end
  end

  -- first returns which of these queues, a list of records, goes first at ROOT, and its share of the grants.
  function order.first(list)
    local standings, first = standings_of(list[1], order.root) -- a queue's record stands for a flow
    local best = 1
    for i = 2, standings and #list or 1 do
      local row = standings.rows[list[i].queue]
      if row and goes_before(row, first) then best, first = i, row end
    end
    return best, first and first.weight or 1
  end

  -- move_tag moves V to the least tag, and the tag of a flow's side by the costs of a grant. It returns whether live
  -- tickets wait, of which it need not know if the flow is live.
  local function move_tag(standings, flow_row, costs)
    local list, account, live = standings.list, flow_row.account, false
    local v = account.tag
    for k = 1, #list do
      local row = list[k]
      if (row.account.tag < v or flow_row.class == BATCH and row.class == LIVE) and waits(standings, row) then
        v, live = min(v, row.account.tag), live or row.class == LIVE
      end
    end
    standings.v, standings.changed = max(standings.v, v), true
    local least = 2 * account.tag / MOST -- doubles round: less might not move it
    account.tag = account.tag + max(least, fair.part_of(standings.scope, costs.windows) / flow_row.weight)
    standings.tags[flow_row.side.q.queue] = account.tag
    return live
  end

  -- note_grant_at counts a grant at a scope. `delay` is the longest period (us) of the broader scopes at which live
  -- tickets delayed this batch, 0 for none. It returns that period for this scope and the broader ones.
  local function note_grant_at(flow, scope, costs, delay)
    local standings, flow_row = standings_of(flow, scope)
    if not standings then return delay end
    local live = move_tag(standings, flow_row, costs)
    standings.mixed = standings.both and (live or flow_row.class == LIVE)
    if flow_row.class == LIVE then return 0 end
    local longest, until_next = delay, 0 -- a batch's next ticket goes as late as its costs take at the windows' rates
    for _, i in ipairs(scope.spec.windows) do
      local st = scope.states[i]
      if st.period and st.period <= PACED then
        longest = max(longest, st.period)
        until_next = max(until_next, costs.windows[i] * st.every)
      end
    end
    if until_next > 0 then standings.time = ceil(max(standings.time, now - delay) + until_next) end
    return live and longest or delay
  end

  function order.note_grant(flow, list, costs)
    if not sides[2] and not flow.batch then return end
    local delay = call.numbers[''] and 0 or note_grant_at(flow, order.root, costs, 0)
    for s = #list, 1, -1 do delay = note_grant_at(flow, list[s], costs, delay) end
  end

  -- write writes the tags that have moved. They are kept until the scope's windows are empty, and for TAGS_MS at least.
  function order.write()
    for suffix, standings in pairs(all_standings) do
      if standings.changed then
        local tags, mixed, lasts = standings.tags, standings.mixed and 1 or 0, now
        local words = {format('%.17g %d %d', standings.v, standings.time, mixed)}
        for name, row in pairs(standings.rows) do tags[name] = row.account.tag end
        for name, tag in pairs(tags) do
          if tag >= standings.v then words[#words + 1] = format('%s=%.17g', name, tag) end
        end
        for _, i in ipairs(standings.scope.spec.windows) do
          lasts = max(lasts, call.windows[i].algorithm.resets_at(standings.scope.states[i], now))
        end
        local ms = format('%d', max(TAGS_MS, ceil((lasts - now) / 1000)))
        redis.call('SET', P .. 's:' .. suffix, concat(words, ' '), 'PX', ms)
      end
    end
  end

  return order
end
