-- line_order.lua: who goes first at a scope: queues and classes.
--
-- docs/explanation/line.md explains how they share a scope. The words of this file:
--   side        the tickets of one class, live or batch, in one queue. A server takes from its sides together; to a
--               take, all other sides are those of other servers
--   tag, V      a side's tag at a scope grows by each grant there, the less the more the side weighs, as a tenant's
--               does in line_fair.lua. But V is the least tag of the sides that wait, and never falls
--   standings   of a scope: `list` has a row for each side that waits there, or waited in this call; `rows` the same by
--               queue; `tags` has the known tags, also of sides that do not wait now
--   account     has the tag of a row. Sides that a take serves by strict priorities share one, for each class
--   owed        what a ticket leaves to the rows that go before it: see order.owed
--
-- A side that begins to wait starts at max(V, its last tag); a batch below V one ticket after V if live sides wait.
--
-- A take serves its side with the least tag at ROOT; while that side waits for a window, no other is served. A take
-- also leaves room for a side of another server that goes first. If its ticket does not fit yet, and no window has
-- leases, that room lapses LATE after the ticket fits; else it is kept from LATE before the side's appointment to LATE
-- after. If live tickets delay a batch at a scope, it catches up at narrower scopes: see note_grant_at.
--
-- Example: servers A and B have a queue with one flow each, at a window of 10 requests. So either weighs 1/2, and a
-- request moves its tag by 1/10 / (1/2) = 1/5 of WHOLE. The tags are 3/5 and 1/5. B has 5 tickets, and an appointment
-- in 10 ms; the window has room for two. Now A takes. B goes before it, by two tickets, so A leaves two units, and gets
-- no ticket with less room than three. But it gets one in 30 ms at the latest, when the room for B lapses.
--
-- Key, after the prefix P of the policy:
--   s:SUFFIX   "V time mixed side=tag ...": `time` is when the next ticket of a batch goes (us), `mixed` is 1
--              if both classes waited at the last grant; of the tags, those that are V or more
--
-- new_order(L, names, strict) returns a table of functions; names are the sides of a take, none for other calls.

local PACED = 60000000 -- us, the longest period of windows over which batches are spread
local function new_order(L, names, strict)
  local LATE = 20000     -- us
  local BURST = 100000   -- us by which tickets of a batch may go before their time
  local TAGS_MS = 60000  -- for which tags are kept, at least
  local LIVE, BATCH = 1, 2
  local NONE = -1        -- the tag of an account whose sides have none yet

  local call, fair, heads = L.call, made_once(new_fair, L), made_once(new_heads, L)
  local P, now = call.P, call.now
  local order = { -- root: the scope that all share, even if it has no window
    root = call.numbers[''] and scopes.open(call, ROOT, call.numbers['']) or {suffix = ROOT, spec = {windows = {}}},
  }
  local of_take, sides, all_standings, servers = {}, {}, {}, {}
  for i = 1, #names do of_take[names[i]] = true end
  for name, q in pairs(L.queues) do
    local since = now - LATE
    local appointment = q.first > since and q.first or q.last > since and q.last -- the next one, or false
    if q.n > 0 and (of_take[name] or appointment and L.alive(q)) then
      sides[#sides + 1] = {q = q, of_take = of_take[name], appointment = appointment}
      servers[q.server] = true
    end
  end
  table.sort(sides, function(a, b) return a.q.queue < b.q.queue end) -- equal tags go by name
  local many_servers = next(servers, next(servers)) ~= nil
  local narrow = false -- whether tickets may wait, or need room (add_waiting), at other scopes than ROOT
  for k = 1, #sides do
    local side, q = sides[k], sides[k].q
    local at_root = side.of_take and heads.due_at(q.queue, ROOT) and 1 or 0
    narrow = narrow or not side.of_take or redis.call('ZCARD', P .. q.dues_key) > at_root
  end

  -- add adds the row of a side. tally: of its tickets there; lapses: until when room is kept for it, 0 if none is.
  local function add(standings, side, tally, lapses)
    local class = side.q.batch and BATCH or LIVE
    local row = {
      side = side, class = class, tally = tally, lapses = lapses, weight = 1,
      account = strict and side.of_take and standings.shared_accounts[class] or {tag = NONE},
      step = false, units = false, -- see average_costs
    }
    standings.list[#standings.list + 1] = row
    standings.rows[side.q.queue] = row
  end

  -- add_waiting adds a side's row if it has tickets waiting at a scope. Another server's tickets that fit at
  -- every scope wait at ROOT, and still need room at each. A tally is a node, or a flow: that waits at its `suffix`.
  local function add_waiting(standings, side, flow)
    local scope, suffix, name, of_other = standings.scope, standings.scope.suffix, side.q.queue, not side.of_take
    local due = heads.due_at(name, suffix) or of_other and heads.due_at(name, ROOT)
    if not due then return end
    local tally = L.tickets_at(name, scope, flow)
    if not tally or tally.n == 0 or tally.suffix ~= suffix and tally.suffix ~= ROOT then return end
    local list, has_leases, lapses = scope.spec.windows, false, 0
    for j = 1, #list do has_leases = has_leases or call.windows[list[j]].algorithm.release end
    if of_other and due > now and not has_leases then
      lapses = due + LATE
    elseif of_other and side.appointment <= now + LATE then
      lapses = side.appointment + LATE
    end
    add(standings, side, tally, lapses)
  end

  -- average_costs sets what a ticket of a row costs on average: `units`, by unit; `step`, by how much it moves the tag.
  local function average_costs(standings, row)
    local costs = {}
    row.units = {}
    for _, i in ipairs(standings.scope.spec.windows) do
      local unit = call.windows[i].unit
      row.units[unit] = ceil(line_units.of_unit(row.tally, unit) / max(1, row.tally.n))
      costs[i] = row.units[unit]
    end
    row.step = fair.part_of(standings.scope, costs) / row.weight
  end

  -- weight_of_flows returns the weight of a side's flows that wait at a scope, or at ROOT if none waits there.
  local function weight_of_flows(q, scope)
    local flows = L.count_flows(q.queue .. '|' .. scope.suffix)
    if flows == 0 then flows = L.count_flows(q.key) end
    return max(1, flows * q.weights / max(1, q.flows)) -- by the mean of the queue's flows
  end

  -- weigh sets the weights of all rows. Classes share by batch_share; servers of a class by their flows' weights, but
  -- equally at a tenant's own scope; queues of a server by priority. If that is strict, they share one account: each
  -- has the server's whole weight.
  local function weigh(standings)
    local list, servers_of, of_class = standings.list, {{}, {}}, {0, 0}
    local equally = standings.scope.spec.of_tenant or not many_servers
    for k = 1, #list do
      local row, q = list[k], list[k].side.q
      local server = servers_of[row.class][q.server] or {priorities = 0, weight = 0}
      servers_of[row.class][q.server], row.server = server, server
      local more = server.weight == 0 and 1 or 0 -- each server weighs 1
      if not equally then more = weight_of_flows(q, standings.scope) end
      server.priorities, server.weight = server.priorities + q.priority, server.weight + more
      of_class[row.class] = of_class[row.class] + more
    end
    standings.both = of_class[LIVE] > 0 and of_class[BATCH] > 0
    for k = 1, #list do
      local row = list[k]
      local weight = row.server.weight / of_class[row.class]
      if not (strict and row.side.of_take) then weight = weight * row.side.q.priority / row.server.priorities end
      if standings.both then weight = weight * (row.class == BATCH and call.batch_share or 1 - call.batch_share) end
      row.weight, row.step = weight, false
    end
  end

  -- begin sets the tags of rows to the known ones, but at least V. Where both classes wait, but did not at the last
  -- grant, batches begin anew: they lose theirs.
  local function begin(standings)
    local list, tags, v = standings.list, standings.tags, standings.v
    for name in pairs(tags) do
      if standings.both and not standings.mixed and byte(name, -1) == 33 then tags[name] = nil end
    end
    for k = 1, #list do list[k].account.tag = NONE end -- a shared account then gets the greatest tag of its sides
    for k = 1, #list do
      local account = list[k].account
      account.tag = max(account.tag, tags[list[k].side.q.queue] or NONE)
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

  local function new_standings(scope)
    all_standings[scope.suffix] = {
      scope = scope, list = {}, rows = {}, tags = {}, v = 0, time = 0, both = false, mixed = false, changed = false,
      shared_accounts = {{tag = NONE}, {tag = NONE}},
      complete = false, read = false, weighed = false, -- all sides have been looked for; the key was read; see weigh
    }
    return all_standings[scope.suffix]
  end

  local function read(standings)
    standings.read = true
    local text = redis.call('GET', P .. 's:' .. standings.scope.suffix)
    if not text then return end
    local v, time, mixed = match(text, '^(%S+) (%d+) (%d)')
    standings.v, standings.time, standings.mixed = v + 0, time + 0, mixed == '1'
    for name, tag in gmatch(text, '([^ =]*)=(%S+)') do standings.tags[name] = tag + 0 end
  end

  -- standings_of returns the standings of a scope, and the row of a flow's side. It returns nil for a live flow until
  -- another side has a row there, as there is none to share with. A batch that is alone still has its `time`.
  local function standings_of(flow, scope)
    if not narrow and scope.suffix ~= ROOT and not flow.batch then return nil end
    local standings, name = all_standings[scope.suffix] or new_standings(scope), flow.queue
    local list, rows = standings.list, standings.rows
    if not standings.complete or list[1] and not rows[name] then -- in a join its side may wait only since
      for k = 1, #sides do
        if not rows[sides[k].q.queue] then add_waiting(standings, sides[k], flow) end
      end
      standings.complete, standings.weighed = true, false
    end
    local others_wait = list[2] or list[1] and not rows[name]
    if not (others_wait or flow.batch or standings.read) then return nil end
    if not rows[name] then -- a newcomer, or a side whose flows wait at ROOT
      add(standings, {q = L.queue_of(name), of_take = true}, flow, 0)
      standings.weighed = false
    end
    if not standings.read then read(standings) end
    if not standings.weighed then
      standings.weighed = true
      weigh(standings)
      begin(standings)
    end
    return standings, rows[name]
  end

  -- waits returns whether a row's side waits at the scope, also after grants of this call. A tenant's flow that has
  -- passed the scope in this call, and waits at ROOT, still counts there: its ticket has not been charged.
  local function waits(standings, row)
    local suffix = standings.scope.suffix
    return row.tally.n > 0 and (not row.side.of_take or heads.due_at(row.side.q.queue, suffix) or
      suffix ~= ROOT and row.tally.passed and row.tally.suffix == ROOT)
  end

  local function goes_before(a, b)
    if a.account.tag ~= b.account.tag then return a.account.tag < b.account.tag end
    if a.class ~= b.class then return a.class < b.class end
    return strict and a.side.of_take and a.side.q.priority > b.side.q.priority
  end

  -- reserve adds to `owed` the units of a row's next tickets, until these lapse: of the tickets that it has, as many as
  -- bring its tag up to `tag`, but one at least.
  local function reserve(owed, standings, row, tag, lapses)
    if not row.step then average_costs(standings, row) end
    local n = min(row.tally.n, max(1, ceil((tag - row.account.tag) / row.step - 1e-6)))
    for unit, cost in pairs(row.units) do owed.reserved[unit] = (owed.reserved[unit] or 0) + n * cost end
    owed.lapses = min(owed.lapses, lapses)
  end

  -- owe adds to `owed` what a flow leaves to a row that goes before it. tag: of the flow's side.
  local function owe(owed, standings, row, tag)
    if not row.side.of_take then
      if row.lapses > 0 then reserve(owed, standings, row, tag, row.lapses) end
      return
    end
    local due = heads.due_at(row.side.q.queue, standings.scope.suffix)
    if due and due > now then -- it does not fit, and the flow waits with it
      local too_early = row.class == BATCH and standings.time > now + BURST -- before its time a batch delays nobody
      local time = min(due, now + appointments.LATEST) -- its server may have gone by then
      if not too_early then owed.opens = max(owed.opens or 0, time) end
    elseif standings.scope.suffix ~= ROOT then -- at ROOT this take visits that side before the flow
      reserve(owed, standings, row, tag, now + LATE)
    end
  end

  -- owed returns what the flow leaves to others at a scope, {reserved, lapses, opens}, or nil: the units `reserved`
  -- until `lapses`; until `opens`, if that is set, it waits even if its costs fit.
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
    if flow_row.class == BATCH and not live and standings.time > now + BURST then -- beside live tickets tags decide
      owed = owed or {reserved = {}, lapses = MOST, opens = nil}
      owed.opens = max(owed.opens or 0, standings.time - BURST)
    end
    return owed
  end

  -- moved notes that a flow began to wait at this scope.
  function order.moved(suffix)
    narrow = narrow or suffix ~= ROOT
    if all_standings[suffix] then all_standings[suffix].complete = false end
  end

  -- first returns which of these queues, a list of records, goes first at ROOT, and its share of the grants.
  function order.first(list)
    local best, standings, first = 1, standings_of(list[1], order.root) -- a queue's record stands for a flow
    for i = 2, standings and #list or 1 do
      local row = standings.rows[list[i].queue]
      if row and goes_before(row, first) then best, first = i, row end
    end
    return best, first and first.weight or 1
  end

  -- move_tag moves V to the least tag, and the tag of a flow's side by the costs of a grant. It returns whether live
  -- tickets wait, but looks for them only for a batch.
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

  -- note_grant_at counts a grant at a scope. `arrears` (us): how far a batch's time here may lie in the past, so that
  -- it catches up. It is 0 unless live tickets delayed the batch at a broader scope; then it is the longest period, up
  -- to PACED, of that scope's windows. It returns the arrears for narrower scopes.
  local function note_grant_at(flow, scope, costs, arrears)
    local standings, flow_row = standings_of(flow, scope)
    if not standings then return arrears end
    local live = move_tag(standings, flow_row, costs)
    standings.mixed = standings.both and (live or flow_row.class == LIVE)
    if flow_row.class == LIVE then return 0 end
    local longest, until_next = arrears, 0 -- us in which the slowest window gets back what the ticket took
    for _, i in ipairs(scope.spec.windows) do
      local st = scope.states[i]
      if st.period and st.period <= PACED then
        longest = max(longest, st.period)
        until_next = max(until_next, costs.windows[i] * st.every)
      end
    end
    if until_next > 0 then standings.time = ceil(max(standings.time, now - arrears) + until_next) end
    return live and longest or arrears
  end

  function order.note_grant(flow, list, costs)
    if not sides[2] and not flow.batch then return end
    local arrears = call.numbers[''] and 0 or note_grant_at(flow, order.root, costs, 0)
    for s = #list, 1, -1 do arrears = note_grant_at(flow, list[s], costs, arrears) end
  end

  -- write writes records of scopes with grants. They last until the scope's windows are empty, and TAGS_MS at least.
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
