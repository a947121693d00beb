-- line_join.lua: who comes to a line, and who leaves it untaken.
--
-- new_join(L) -> J, with these verbs; a request r is that of decide.lua, with its place read:
--   waits(id)                      whether the ticket is in line
--   rank(id)                       its rank
--   somebody_waits(r, id)          whether others than the ticket `id` wait at the request's scopes
--   expect(r, list, at, fits)      when a request without a place would start: at least, at most
--   join(r, list, at)              puts its ticket in line -> status, the expected start and its upper bound, whether to nudge a server, its lower bound
--   remove(id)                     takes a ticket out of the line -> whether it was there
--   refresh(r)                     writes a flow's weight and its tenant's own limits as they are now
--   look_again(suffixes)           has whoever waits at these scopes be looked at: something was given back there
--   sweep()                        removes claims whose process is gone
--   take_back(r)                   undoes what a taken ticket moved of its tenant's tags
--   prefetch(tickets, flows, nodes) reads what they will ask for

local new_join
do
local match, format, gsub, sub = string.match, string.format, string.gsub, string.sub
local max, min, floor, ceil = math.max, math.min, math.floor, math.ceil

local SPACING = 5000    -- us between appointments
local FORGET = 10000    -- us after which an appointment that was not kept is forgotten
local LATEST = 1000000  -- us until the latest appointment
local SWEPT = 64

function new_join(L)
  local call = L.call
  local P, now = call.P, call.now
  local J = {}
  L.waiting = {}

  -- How many units wait at a scope, in all queues that are alive: {sum, least, most, tickets}. It is kept while tickets only join.
  local function waiting_units(flow, scope, unit)
    local key = scope.suffix .. ' ' .. unit .. ' ' .. flow.queue
    local known = L.waiting[key]
    if known then return known end
    local sum, least, most, tickets = 0, codec.MOST, 0, 0
    for name, q in pairs(L.queues) do
      local of = nil
      if name == flow.queue then
        of = call.only_tenants and scope.of.of_tenant and flow or L.node_of(name, scope.suffix)
      elseif L.alive(q) then
        of = call.only_tenants and scope.of.of_tenant and L.flow_of(name .. flow.values) or L.node_of(name, scope.suffix)
      end
      if of and of.n > 0 then
        local s, l, m = L.units_of(of, unit)
        sum, tickets, least, most = sum + s, tickets + of.n, min(least, l), max(most, m)
      end
    end
    known = {sum, least, most, tickets}
    L.waiting[key] = known
    return known
  end

  -- By how many of its own units others go before the tickets of a flow, at a node of several tenants: as fair shares
  -- give them, one ticket more of each, and no more than wait there.
  local function units_of_others(flow, scope, costs, cost, before)
    local weights = flow.n == 0 and flow.weight or 0
    for name, q in pairs(L.queues) do
      if name == flow.queue or L.alive(q) then weights = weights + q.weights end
    end
    local node = L.node_of(flow.queue, scope.suffix)
    local debt = max(0, L.tag_of(node, flow) - node.v) * flow.weight / 1000 / L.share(node, costs) * cost
    local others = max(0, weights / flow.weight - 1)
    return floor((before + debt) * others + 1e-6) + ceil(others) * cost
  end

  -- latest_after_own tells when a ticket can go at the latest, given that the tickets of its flow
  -- before it go by the times that they were told: after the last of them, and when all windows are
  -- rid of those beside which it does not fit. Each of them costs `most` of a window at the most.
  -- Where all windows are sliding and all that wait cost the same, that is exact.
  local function latest_after_own(flow, list, at, by_window, most, position, exact)
    local time = at
    local function start_of(place)
      place = format('%d', place)
      local id = redis.call('ZRANGE', P .. 'f:' .. flow.id, place, place)[1]
      local record = id and L.read('t', id)
      return record and codec.unpack7(record, 8)
    end
    L.flush_added()
    if not exact then time = max(time, start_of(position - 1) or at) end
    for s = 1, #list do
      local scope, of = list[s], list[s].of.windows
      for j = 1, #of do
        local i = of[j]
        local algorithm, st, cost = call.windows[i].algorithm, scope.states[i], by_window[i]
        if cost > 0 and algorithm.rid_at then
          local span = floor((algorithm.capacity(st) - cost) / most[i]) + 1
          local start = position >= span and start_of(position - span)
          if start then time = max(time, algorithm.rid_at(st, start, (span - 1) * most[i] + cost)) end
        end
      end
    end
    return time
  end

  -- open_from tells from when on all windows are open together. It is bounded as windows.fits_at
  -- is.
  local function open_from(list, at, by_window, time)
    for _ = 1, 100 do
      local from = time
      for s = 1, #list do
        local of = list[s].of.windows
        for j = 1, #of do time = max(time, windows.fits_window(list[s], of[j], at, from, by_window[of[j]], 0, 1)) end
      end
      if time == from then break end
    end
    return time
  end

  -- expected_start tells when a ticket will fit that comes last in its flow, or behind `behind` others of it: the least
  -- and the most. With all_first, whoever waits goes first. `fits`, if given, gets by window when it fits alone.
  local function expected_start(flow, list, at, costs, behind, all_first, fits)
    local least_time, most_time, by_window, largest, exact = at, at, costs.windows, {}, true
    local alike = true -- in each window all that wait cost the same
    for s = 1, #list do
      local scope, of = list[s], list[s].of.windows
      for j = 1, #of do
        local i = of[j]
        local window, st, cost = call.windows[i], scope.states[i], by_window[i]
        local low, high = at, at
        if cost > 0 then
          local waiting = waiting_units(flow, scope, window.unit)
          local sum, least, most = waiting[1], waiting[2], waiting[3]
          local same = sum == 0 or least == most and least == cost
          largest[i] = max(most, cost)
          alike = alike and same
          exact = exact and same and window.kind == 's'
          local each = same and cost or 1
          low = window.algorithm.fits_at(st, at, at, cost, sum, each)
          if scope.upstream then low = upstream().fits_at(scope, window, st, at, low, cost, sum) end
          if low > at then
            local in_flow = L.units_of(flow, window.unit)
            local before = behind and min(in_flow, behind * cost) or in_flow
            local ahead = sum - in_flow + before
            if not scope.of.of_tenant and not all_first and sum > in_flow then
              ahead = min(ahead, before + units_of_others(flow, scope, costs, cost, before))
            end
            if ahead ~= sum then low = windows.fits_window(scope, i, at, at, cost, ahead, each) end
          end
          high = low
          if not same then
            high = max(low, windows.fits_window(scope, i, at, at, cost, min(codec.MOST, waiting[4] * largest[i]), largest[i]))
          end
        elseif scope.upstream then
          low = upstream().fits_at(scope, window, st, at, at, 0, 0)
          high = low
        end
        if fits then fits[i] = low > at and low or 0 end
        if low > least_time then least_time = low end
        if high > most_time then most_time = high end
      end
    end
    local position = behind or flow.n
    if (#call.windows > 1 or not alike) and most_time > at then
      if position > 0 then most_time = max(most_time, latest_after_own(flow, list, at, by_window, largest, position, exact)) end
      most_time = open_from(list, at, by_window, most_time)
      if exact then least_time = most_time end
    end
    return min(least_time, codec.MOST), min(most_time, codec.MOST)
  end

  local function alone(queue)
    for name, q in pairs(L.queues) do
      if name ~= queue and L.alive(q) then return false end
    end
    return true
  end

  -- least_start tells when a ticket can start at the earliest, whatever becomes of other flows: who waits at a narrower node may be held
  -- up there for long. Only where all windows have one scope, and all wait in one queue, do all go before it. Slots may be given
  -- back at any time.
  local function least_start(flow, list, at, costs, behind, low)
    if #list == 1 and not call.leases and alone(flow.queue) then return low end
    local least = at
    for s = 1, #list do
      local scope, of = list[s], list[s].of.windows
      for j = 1, #of do
        local i = of[j]
        local unit, cost = call.windows[i].unit, costs.windows[i]
        local in_flow = L.units_of(flow, unit)
        if not call.windows[i].algorithm.release then
          local time = windows.fits_window(scope, i, at, at, cost, behind and min(in_flow, behind * cost) or in_flow, 1)
          if time > least then least = time end
        end
      end
    end
    return min(least, low)
  end

  -- nudge tells whether a server has to be woken for a ticket that is expected to start at `time`: none will ask by then.
  local function nudge(queue, time)
    local q = L.queue_of(queue)
    local kept = q.last >= now - FORGET and not (q.first < now - FORGET and q.asked < q.first)
    if kept and q.first <= max(time, now) + SPACING then return 0 end
    local at = q.claims and min(max(time, now), now + LATEST) or now -- who has claims asks when they are expected to start
    q.first, q.last, q.changed = at, at, true -- one wakes: others need not be woken by the next tickets
    return 1
  end

  -- note_limits notes by which limits a flow got its place: a take looks at it again by others.
  local function note_limits()
    local known, limits = L.read('u', 'limits'), windows.limits()
    if not known then
      L.write('u', 'limits', limits)
    elseif known ~= limits then
      L.write('u', 'limits', '-')
    end
  end

  -- A tenant's own parameters by the windows' names: their places may be others when they are read again.
  local function own_text(own)
    if own == '' or own:sub(1, 1) == '@' then return own end
    return (gsub(own, '(%d+)( %S+ %S+ %S+;)', function(i, rest) return '@' .. call.windows[i + 0].name .. rest end))
  end

  -- The flow of a request, as it is stored or as it would be.
  local function flow_for(r)
    local flow = L.flow_of(r.flow)
    if flow and flow.n > 0 then return flow end
    return L.new_flow(r.flow, r.weight + 0, r.tenant, r.suffixes, own_text(r.own))
  end

  function J.prefetch(tickets, flows, nodes)
    nodes[#nodes + 1] = 'line'
    nodes[#nodes + 1] = 'limits'
    L.read_all('t', tickets)
    L.read_all('f', flows)
    L.read_all('u', nodes)
    L.read_line()
  end

  function J.waits(id) return L.read('t', id) and true or false end

  -- rank is the place of a ticket as text, nil if it is not in line.
  function J.rank(id)
    local _, _, _, rank = L.ticket(id)
    return rank
  end

  -- Who waits for slots only, where no window is shared, holds up nobody who has one. But the first of the same flow may wait
  -- there for more than this request takes, and have no room any more.
  function J.somebody_waits(r, id)
    for name, q in pairs(L.queues) do
      if name == r.queue and q.n > 0 or name ~= r.queue and L.alive(q) then
        for i = 1, #r.suffixes do
          local waiting = redis.call('ZCARD', P .. 'n:' .. name .. '|' .. r.suffixes[i])
          if waiting == 1 and id then
            local own = L.ticket(id)
            local flow = own and L.flow_of(own)
            if flow and flow.n == 1 and flow.queue == name and flow.suffix == r.suffixes[i] then waiting = 0 end
          end
          if waiting > 0 then return true end
        end
      end
    end
    local own = not L.numbers[''] and L.flow_of(r.flow)
    if own and own.suffix == windows.ROOT and own.same ~= windows.costs_of(call, r.costs_text) then
      local first = L.first_ticket(own)
      return first and first.id ~= id and L.blocker(own, first.costs) and true or false
    end
    return false
  end

  function J.expect(r, list, at, fits)
    local flow, costs = flow_for(r), windows.costs_of(call, r.costs_text)
    local low, high = expected_start(flow, list, at, costs, nil, false, fits)
    if low <= at then low, high = expected_start(flow, list, at, costs, nil, true, fits) end
    return low, high
  end

  function J.remove(id)
    local of, text = L.ticket(id)
    if not of then return false end
    local flow = L.flow_of(of)
    L.flush_added()
    if not flow then
      L.write('t', id, false)
      L.count = L.count - 1
      return true
    end
    local first = redis.call('ZRANGE', P .. 'f:' .. of, '0', '0')[1]
    -- Whoever was behind it may fit.
    if first == id and flow.suffix then
      for name, q in pairs(L.queues) do
        if name == flow.queue or q.n > 0 and L.due_at(name, flow.suffix) then L.due(name, flow.suffix, now) end
      end
      L.reopen(flow, nil)
    end
    redis.call('ZREM', P .. 'f:' .. of, id)
    L.forget(flow, id, windows.costs_of(call, text))
    if first == id and flow.n > 0 then
      flow.heads, flow.read_to_end = nil, nil
      local second = L.first_ticket(flow)
      if second then L.place(flow, second.rank, second.costs) end
    end
    return true
  end

  function J.join(r, list, at)
    local costs = windows.costs_of(call, r.costs_text)
    local of = L.ticket(r.ticket)
    if of then
      if of == r.flow then
        L.flush_added()
        local flow, behind = L.flow_of(of), redis.call('ZRANK', P .. 'f:' .. of, r.ticket)
        if flow and behind then
          local low, high = expected_start(flow, list, at, costs, behind)
          return 6, low, high, 0, low > at and least_start(flow, list, at, costs, behind, low) or low
        end
      end
      J.remove(r.ticket) -- in another flow, after scopes or attributes changed
    end
    local flow = flow_for(r)
    local low, high = expected_start(flow, list, at, costs, r.front and 0 or nil)
    local least = low > at and least_start(flow, list, at, costs, r.front and 0 or nil, low) or low
    if r.options ~= '' then
      if r.backlog > 0 and flow.n >= r.backlog then return 5, low, high, 0 end
      if r.max_wait > 0 and high - at > r.max_wait then return 4, low, high, 0 end
      if r.deadline > 0 and least - at > r.deadline then return 7, low, high, 0, least end
    end

    local rank = r.rank
    if not rank then
      -- Ranks grow with time, so that who is put back in a line that was empty goes before who came since.
      L.line_changed = true
      if r.front then
        L.front = max(L.front + 1, now)
        rank = format('%d', L.RANK_ZERO - L.front)
      else
        L.rank = max(L.rank + 1, now)
        rank = format('%d', L.RANK_ZERO + L.rank)
      end
    end
    local q = L.queue_of(r.queue)
    if q.claims then q.asked = now end
    q.n, q.changed = q.n + 1, true
    L.count = L.count + 1
    local is_first = flow.n == 0
    if is_first then
      L.flows[r.flow] = flow
      q.weights = q.weights + flow.weight
      if call.only_tenants then flow.tag = max(L.tag_of(L.node_of(flow.queue, windows.ROOT), flow), 0) end
    end
    L.new_ticket(r.ticket, flow, costs, rank, r.key, high)
    local added = L.added[r.flow]
    if not added then
      added = {}
      L.added[r.flow] = added
    end
    added[#added + 1] = rank
    added[#added + 1] = r.ticket
    for s = 1, #list do
      for unit, cost in pairs(costs.units) do
        local waiting = L.waiting[list[s].suffix .. ' ' .. unit .. ' ' .. r.queue]
        if waiting then
          waiting[1], waiting[4] = min(codec.MOST, waiting[1] + cost), waiting[4] + 1
          if cost < waiting[2] then waiting[2] = cost end
          if cost > waiting[3] then waiting[3] = cost end
        end
      end
    end
    L.count_units(flow, costs, 1)
    local nodes = L.nodes_of(flow)
    for i = 1, #nodes do L.count_units(nodes[i], costs, 1) end
    if is_first then
      L.place(flow, rank, costs)
      note_limits()
    elseif r.front or r.rank then
      flow.heads, flow.read_to_end = nil, nil
      local first = L.first_ticket(flow)
      if first and first.id == r.ticket then
        L.place(flow, rank, costs)
        note_limits()
      end
    end
    return 3, low, high, r.rank and 0 or nudge(r.queue, low), least
  end

  function J.refresh(r)
    local flow = L.flow_of(r.flow)
    if not flow or flow.n == 0 then return end
    local q = L.queue_of(flow.queue)
    q.weights, q.changed = max(0, q.weights + r.weight - flow.weight), true
    flow.weight, flow.own_text, flow.changed = r.weight + 0, own_text(r.own), true
    flow.own = windows.own_parameters(call, flow.own_text)
    if flow.suffix then L.due(flow.queue, flow.suffix, now) end
  end

  function J.look_again(suffixes)
    for name, q in pairs(L.queues) do
      if q.n > 0 then
        for i = 1, #suffixes do
          if L.due_at(name, suffixes[i]) then L.due(name, suffixes[i], now) end
        end
      end
    end
  end

  -- sweep removes claims whose process is gone: so many a call.
  function J.sweep()
    local left = SWEPT
    for name, q in pairs(L.queues) do
      if q.claims and q.n > 0 and not L.alive(q) then
        for _, suffix in ipairs(redis.call('ZRANGE', P .. 'd:' .. name, '0', format('%d', SWEPT))) do
          for _, member in ipairs(redis.call('ZRANGE', P .. 'n:' .. name .. '|' .. suffix, '0', format('%d', SWEPT))) do
            for _, id in ipairs(redis.call('ZRANGE', P .. 'f:' .. sub(member, 18), '0', format('%d', SWEPT))) do
              if left > 0 and J.remove(id) then left = left - 1 end
            end
          end
        end
      end
    end
  end

  function J.take_back(r)
    local flow = flow_for(r)
    L.charge(flow, windows.costs_of(call, r.costs_text), -1)
    if flow.n > 0 and flow.suffix then flow.score = L.score(L.node_of(flow.queue, flow.suffix), flow) end
  end

  return J
end
end
