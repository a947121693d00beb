-- line_bounds.lua: when a ticket starts that has to wait: the expected start, and bounds of it.
--
-- new_bounds(L, waiting_units) -> function, the expected of line_eta.lua.

local function new_bounds(L, waiting_units)
  local units_of = line_units.of_unit

  local ROUNDS = 100 -- windows that are almost never open together get a time to look again

  local call = L.call
  local P = call.P
  local order
  local largest, numbers, closed = {}, {}, {} -- by window: of a ticket, of tickets, and for how long
  local places, scope_at, n = {}, {}, 0       -- the windows of a flow's scopes, and the scope of each

  -- shares_of_batches tells what batches take of a scope's unit, by their share, before a live ticket
  -- that has so many units before it: the most units, of how many tickets, and the most that
  -- one costs. It is 0 for a ticket of a batch.
  local function shares_of_batches(flow, scope, unit, units)
    if flow.batch then return 0, 0, 0 end
    local sum, least, most, tickets = waiting_units(flow, scope, unit, true)
    if tickets == 0 then return 0, 0, 0 end
    sum = min(sum, ceil(units * order.ratio) + most)
    return sum, min(tickets, ceil(sum / max(1, least))), most
  end

  -- weights_of_others returns the weights of all others of its class that wait, in that of the flow,
  -- and what the flow has had before them of a shared node's windows, as a part of all that they hold.
  local function weights_of_others(flow, node)
    local batch = flow.batch
    local weights = flow.n == 0 and flow.weight or 0
    for name, q in pairs(L.queues) do
      if q.batch == batch and (name == flow.queue or L.alive(q)) then weights = weights + q.weights end
    end
    local debt = max(0, L.tag_of(node, flow) - node.v) * flow.weight / 1000
    return max(0, weights / flow.weight - 1), debt
  end

  -- flows_of_others returns how many others of its class wait.
  local function flows_of_others(flow)
    local flows, queues = flow.n > 0 and -1 or 0, L.queues
    local batch = flow.batch
    local first = next(queues)
    if first == flow.queue and next(queues, first) == nil then return flows + queues[first].flows end
    for name, q in pairs(queues) do
      if q.batch == batch and (name == flow.queue or L.alive(q)) then flows = flows + q.flows end
    end
    return flows
  end

  -- units_of_others tells how many units others take at a shared node before a ticket that has
  -- `before` units of its own flow ahead: their fair shares of that, and one ticket more of each;
  -- and the most of them: of tenants with small weights one ticket may be more than a share.
  local function units_of_others(flow, scope, costs, cost, before)
    local node = L.node_of(flow.queue, scope.suffix)
    local others, debt = weights_of_others(flow, node)
    local share = floor((before + debt / L.share(node, costs) * cost) * others + 1e-6)
    return share + ceil(others) * cost, share + max(flows_of_others(flow), ceil(others)) * cost
  end

  -- latest_after_own tells when a ticket goes at the latest if those of its flow before it go when
  -- they were told. It goes after the last of them, and when all windows are rid of those beside
  -- which it does not fit. The time is exact if all windows are sliding and all that wait cost the
  -- same.
  local function latest_after_own(flow, at, by_window, position, exact)
    local time = at
    local function start_of(place)
      place = format('%d', place)
      local id = redis.call('ZRANGE', P .. 'f:' .. flow.id, place, place)[1]
      local record = id and L.read('t', id)
      return record and unpack7(record, 8)
    end
    -- Others may have come and gone since it was told: it fits no window alone before this.
    local function fits_alone(place)
      local earliest = at
      for k = 1, n do
        local i, cost = places[k], by_window[places[k]]
        if cost > 0 then
          local _, least_cost = units_of(flow, call.windows[i].unit)
          local each = exact and cost or 1
          local fits = windows.fits_window(scope_at[k], i, at, at, least_cost, place * least_cost, each)
          earliest = max(earliest, fits)
        end
      end
      return earliest
    end
    L.flush_added()
    if not exact then time = max(time, start_of(position - 1) or at) end
    for k = 1, n do
      local i = places[k]
      local algorithm, st, cost = call.windows[i].algorithm, scope_at[k].states[i], by_window[i]
      if cost > 0 and algorithm.rid_at then
        local span = floor((st.limit - cost) / largest[i]) + 1
        local start = position >= span and start_of(position - span)
        if start then
          start = max(start, fits_alone(position - span))
          time = max(time, algorithm.rid_at(st, start, (span - 1) * largest[i] + cost))
        end
      end
    end
    return time
  end

  -- open_from tells from when on all windows are open together.
  local function open_from(at, by_window, time)
    for _ = 1, ROUNDS do
      local from = time
      for k = 1, n do
        local i = places[k]
        time = max(time, windows.fits_window(scope_at[k], i, at, from, by_window[i], 0, 1))
      end
      if time == from then break end
    end
    return time
  end

  -- starts_in tells when a cost fits in one window: the least and the most. sum, most and
  -- tickets are what waits at the scope, `same` tells whether all of that costs the same.
  local function starts_in(flow, scope, i, at, costs, behind, all_first, sum, most, tickets, same)
    local window, st, cost = call.windows[i], scope.states[i], costs.windows[i]
    local each = same and cost or 1
    local low = window.algorithm.fits_at(st, at, at, cost, sum, each)
    if scope.upstream then low = upstream().fits_at(scope, window, st, at, low, cost, sum) end
    local high, batch = low, flow.batch
    if low > at or batch then
      local in_flow = units_of(flow, window.unit)
      local before = behind and ceil(in_flow * behind / max(1, flow.n)) or in_flow
      local ahead = sum - in_flow + before
      local most_ahead = ahead
      if not scope.of.of_tenant and not all_first and sum > in_flow then
        local others, most_others = units_of_others(flow, scope, costs, cost, before)
        local live = batch and waiting_units(flow, scope, window.unit, false) or 0 -- all goes first
        ahead = min(ahead, before + others + live)
        -- Flows of one tenant have one tag: how these share is not known.
        if call.only_tenants then most_ahead = min(most_ahead, before + most_others + live) end
      end
      if call.batches then
        local in_share = shares_of_batches(flow, scope, window.unit, ahead + cost)
        ahead, most_ahead = ahead + in_share, most_ahead + in_share
      end
      if ahead ~= sum then low = windows.fits_window(scope, i, at, at, cost, ahead, each) end
      high = low
      if most_ahead > ahead then
        high = windows.fits_window(scope, i, at, at, cost, most_ahead, each)
      end
      local live = batch and waiting_units(flow, scope, window.unit, false) or 0
      if batch then
        local from = windows.fits_window(scope, i, at, at, cost, live, 1)
        local pace, period = order.pace(scope, i, ahead - live, from)
        if pace then
          low = max(low, pace)
          -- The pace and the window each cost a part of a period until they are in step.
          high = max(high, low, order.pace(scope, i, most_ahead - live, from) + 2 * period)
        end
      end
    end
    if same then return low, high end
    local largest = max(most, cost)
    local ahead = min(MOST, tickets * largest)
    return low, max(high, windows.fits_window(scope, i, at, at, cost, ahead, largest))
  end

  -- Others may be held up at a narrower node for long, or go by other weights. Only tickets of the
  -- flow itself are sure to go first. Slots may be given back at any time.
  local function least_start(flow, at, by_window, behind, low)
    local least = at
    for k = 1, n do
      local i = places[k]
      local window = call.windows[i]
      if not window.algorithm.release then
        local before, least_cost = units_of(flow, window.unit)
        if behind then before = min(before, behind * least_cost) end
        least = max(least, windows.fits_window(scope_at[k], i, at, at, by_window[i], before, 1))
      end
    end
    return min(least, low)
  end

  -- alone tells whether all live tickets that wait are in this queue.
  local function alone(queue)
    for name, q in pairs(L.queues) do
      if name ~= queue and L.alive(q) and not q.batch then return false end
    end
    return true
  end

  -- closed_for is the longest for which a window may have no room for the largest ticket, if
  -- all that waits takes from it, whenever other windows let it.
  local function closed_for(scope, i, at, most, tickets)
    local algorithm, st = call.windows[i].algorithm, scope.states[i]
    local ahead = min(MOST, tickets * most)
    local opens = windows.fits_window(scope, i, at, at, most, ahead, most)
    if opens == at or not algorithm.span then return opens - at end
    -- Any spans may be the full ones, each to its end, and this one may be full already.
    local length, _, counts = algorithm.span(st)
    local full = floor(counts * tickets / max(1, floor(st.limit / most))) + 1
    return max(opens - at, full * length)
  end

  -- full_for tells how long a window takes to be empty again that is full, and in how many such
  -- spans a grant may count.
  local function full_for(algorithm, st)
    if not algorithm.span then return algorithm.rid_at(st, 0, st.limit), 1 end
    local length, _, counts = algorithm.span(st)
    return length, counts
  end

  -- fair_share is the longest that a ticket waits where only tenants count, by what
  -- fairness leaves to others. Of a tenant's own windows, as many tickets go in each cycle as the
  -- windows hold. In each cycle the flow comes to ROOT once, when the shared windows may be full, and
  -- others go first with their shares and one ticket each.
  local function fair_share(flow, position)
    local tickets, longest, cycles, part = position + 1, 0, 1, 0.001
    for k = 1, n do
      local i, scope = places[k], scope_at[k]
      if closed[i] > 0 then
        local algorithm, st = call.windows[i].algorithm, scope.states[i]
        if not algorithm.rid_at then return MOST end
        if scope.of.of_tenant then
          longest = max(longest, (full_for(algorithm, st)))
          cycles = max(cycles, ceil(tickets / max(1, floor(st.limit / largest[i]))))
        else
          part = max(part, largest[i] / st.limit) -- the most that a ticket takes of all that it holds
        end
      end
    end
    local others, debt = weights_of_others(flow, L.node_of(flow.queue, windows.ROOT))
    local taken = (tickets * part + debt / 100000000) * others + cycles * flows_of_others(flow) * part
    if call.batches then taken = taken + (taken + tickets * part) * order.ratio + cycles * part end
    local time = cycles * longest
    for k = 1, n do
      local i, scope = places[k], scope_at[k]
      if closed[i] > 0 and not scope.of.of_tenant then
        local period, counts = full_for(call.windows[i].algorithm, scope.states[i])
        local holds = scope.states[i].limit
        local units = min(taken * holds, numbers[i] * largest[i]) + tickets * largest[i]
        time = time + period * (cycles * holds + counts * units) / (holds - largest[i] + 1)
      end
    end
    return time
  end

  -- latest_among_others returns an upper bound where other flows wait, and several windows may hold
  -- them up. Until the ticket starts, one of its windows has no room for the ticket that is first
  -- there. So it starts after all the time together for which its windows may have no room, and are
  -- closed by margins.
  local function latest_among_others(flow, at, low, position)
    local time, paused, margins, part = 0, false, 0, 0
    for k = 1, n do
      local i, scope = places[k], scope_at[k]
      local algorithm = call.windows[i].algorithm
      time, paused = time + closed[i], paused or scope.upstream
      if algorithm.span then
        local length, margin = algorithm.span(scope.states[i])
        margins, part = margins + margin, part + margin / length
      end
    end
    if part >= 1 then return MOST end -- they may never be open together
    local batch = flow.batch
    if time > 2 * (low - at) and call.only_tenants and not paused and not batch and alone(flow.queue) then
      time = min(time, fair_share(flow, position))
    end
    return min(MOST, at + ceil((time + margins) / (1 - part)))
  end

  return function(flow, list, at, costs, behind, all_first, fits)
    if call.batches or flow.batch then order = order or new_order(L, {}) end
    if flow.rest and not call.only_tenants then L.flow_of(flow.id) end -- its tenant counts
    local least_time, most_time, by_window, times, others = at, at, costs.windows, 0, false
    local binds = 0
    local batch = flow.batch
    local alike, exact = true, true -- in each window all that wait cost the same; and all slide
    n = 0
    for s = 1, #list do
      local scope, of = list[s], list[s].of.windows
      for j = 1, #of do
        local i = of[j]
        n = n + 1
        places[n], scope_at[n] = i, scope
        local window, cost, low, high = call.windows[i], by_window[i], at, at
        local sum, least, most, tickets = waiting_units(flow, scope, window.unit)
        local same = sum == 0 or least == most and least == cost
        local _, in_share, share_most = nil, 0, 0
        if call.batches then
          _, in_share, share_most = shares_of_batches(flow, scope, window.unit, sum + cost)
        end
        if in_share > 0 then
          -- While the ticket waits at another scope, a batch may take all that a window holds here.
          local holds = scope.states[i].limit
          local all = list[2] and floor(holds / max(1, share_most)) or 0
          same, others, most, tickets = false, true, max(most, share_most), tickets + in_share + all
        end
        largest[i], numbers[i], closed[i] = max(most, cost), tickets, 0
        if largest[i] > 0 then
          closed[i] = closed_for(scope, i, at, largest[i], tickets)
          if batch then
            same = false
            local pace, period = order.pace(scope, i, tickets * largest[i], at)
            if pace then closed[i] = closed[i] + max(0, pace - at) + 2 * period end
          end
          if closed[i] > 0 then times = times + (cost > 0 and 1 or 2) end
          others = others or tickets > flow.n
        end
        if cost > 0 then
          alike = alike and same
          exact = exact and same and window.algorithm.exact
          if closed[i] > 0 then
            low, high = starts_in(flow, scope, i, at, costs, behind, all_first, sum, most, tickets, same)
          end
        elseif scope.upstream then
          low = upstream().fits_at(scope, window, scope.states[i], at, at, 0, 0)
          high = low
        end
        if fits then fits[i] = low > at and low or 0 end
        if low > least_time then least_time, binds = low, i end
        if high > most_time then most_time = high end
      end
    end
    local position, latest = behind or flow.n, nil
    if others and times > 1 then
      latest = latest_among_others(flow, at, least_time, position)
    elseif (#call.windows > 1 or not alike) and most_time > at then
      if position > 0 then
        local after = latest_after_own(flow, at, by_window, position, exact)
        most_time = max(most_time, after)
      end
      most_time = open_from(at, by_window, most_time)
      if exact and not others then least_time = most_time end
    end
    if latest then most_time = max(least_time, latest) end
    local low = min(least_time, MOST)
    local least = low > at and least_start(flow, at, by_window, behind, low) or low
    return low, min(most_time, MOST), least, binds
  end
end
