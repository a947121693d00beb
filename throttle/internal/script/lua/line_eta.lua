-- line_eta.lua: when a ticket is expected to start.
--
-- new_eta(L) -> E, a table of
--   expected(flow, list, at, costs, behind, all_first, fits) -> least, most
--                    when a ticket of these costs fits behind all others of its flow, or behind
--                    `behind` of them; list: the flow's scopes, at: their time. With all_first, all
--                    tickets that wait at its scopes go first. `fits`, if given, gets by window
--                    when the costs fit there, 0 for at once
--   least_start(flow, list, at, costs, behind, low) -> time
--                    the earliest start, whatever becomes of other flows; low: the expected one
--   joined(r, list, costs)
--                    counts a ticket that joins

local new_eta
do
local max, min, floor, ceil, format = math.max, math.min, math.floor, math.ceil, string.format
local units_of = line_units.of_unit

local ROUNDS = 100 -- windows that are almost never open together get a time to look again

function new_eta(L)
  local call = L.call
  local P = call.P

  -- waiting_units tells how much waits at a scope in all queues that are alive: {sum, least, most,
  -- tickets}. L.waiting keeps it while tickets only join.
  local function waiting_units(flow, scope, unit)
    local key = scope.suffix .. ' ' .. unit .. ' ' .. flow.queue
    local known = L.waiting[key]
    if known then return known end
    local own_only = call.only_tenants and scope.of.of_tenant
    local sum, least, most, tickets = 0, MOST, 0, 0
    for name, q in pairs(L.queues) do
      local of = nil
      if name == flow.queue then
        of = own_only and flow or L.node_of(name, scope.suffix)
      elseif L.alive(q) then
        of = own_only and L.flow_of(name .. flow.values) or L.node_of(name, scope.suffix)
      end
      if of and of.n > 0 then
        local s, l, m = units_of(of, unit)
        sum, tickets, least, most = sum + s, tickets + of.n, min(least, l), max(most, m)
      end
    end
    known = {sum, least, most, tickets}
    L.waiting[key] = known
    return known
  end

  -- units_of_others tells how many units others take at a shared node before a ticket that has
  -- `before` units of its own flow ahead: their fair shares of that, and one ticket more of each.
  local function units_of_others(flow, scope, costs, cost, before)
    local weights = flow.n == 0 and flow.weight or 0
    for name, q in pairs(L.queues) do
      if name == flow.queue or L.alive(q) then weights = weights + q.weights end
    end
    local node = L.node_of(flow.queue, scope.suffix)
    local ahead = max(0, L.tag_of(node, flow) - node.v)
    local debt = ahead * flow.weight / 1000 / L.share(node, costs) * cost
    local others = max(0, weights / flow.weight - 1)
    return floor((before + debt) * others + 1e-6) + ceil(others) * cost
  end

  -- latest_after_own tells when a ticket goes at the latest if those of its flow before it go when
  -- they were told. It goes after the last of them, and when all windows are rid of those beside
  -- which it does not fit. `most` is by window what one of them costs at most. The time is exact if
  -- all windows are sliding and all that wait cost the same.
  local function latest_after_own(flow, list, at, by_window, most, position, exact)
    local time = at
    local function start_of(place)
      place = format('%d', place)
      local id = redis.call('ZRANGE', P .. 'f:' .. flow.id, place, place)[1]
      local record = id and L.read('t', id)
      return record and unpack7(record, 8)
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
          if start then
            time = max(time, algorithm.rid_at(st, start, (span - 1) * most[i] + cost))
          end
        end
      end
    end
    return time
  end

  -- open_from tells from when on all windows are open together.
  local function open_from(list, at, by_window, time)
    for _ = 1, ROUNDS do
      local from = time
      for s = 1, #list do
        local of = list[s].of.windows
        for j = 1, #of do
          time = max(time, windows.fits_window(list[s], of[j], at, from, by_window[of[j]], 0, 1))
        end
      end
      if time == from then break end
    end
    return time
  end

  -- starts_in tells when a cost fits in one window: the least and the most. `waiting` is what waits
  -- at the scope, `same` whether all of that costs the same.
  local function starts_in(flow, scope, i, at, costs, behind, all_first, waiting, same)
    local window, st, cost = call.windows[i], scope.states[i], costs.windows[i]
    local sum, each = waiting[1], same and cost or 1
    local low = window.algorithm.fits_at(st, at, at, cost, sum, each)
    if scope.upstream then low = upstream().fits_at(scope, window, st, at, low, cost, sum) end
    if low > at then
      local in_flow = units_of(flow, window.unit)
      local before = behind and min(in_flow, behind * cost) or in_flow
      local ahead = sum - in_flow + before
      if not scope.of.of_tenant and not all_first and sum > in_flow then
        ahead = min(ahead, before + units_of_others(flow, scope, costs, cost, before))
      end
      if ahead ~= sum then low = windows.fits_window(scope, i, at, at, cost, ahead, each) end
    end
    if same then return low, low end
    local largest = max(waiting[3], cost)
    local ahead = min(MOST, waiting[4] * largest)
    return low, max(low, windows.fits_window(scope, i, at, at, cost, ahead, largest))
  end

  local function expected(flow, list, at, costs, behind, all_first, fits)
    local least_time, most_time, by_window, largest = at, at, costs.windows, {}
    local alike, exact = true, true -- in each window all that wait cost the same; and all slide
    for s = 1, #list do
      local scope, of = list[s], list[s].of.windows
      for j = 1, #of do
        local i = of[j]
        local window, cost, low, high = call.windows[i], by_window[i], at, at
        if cost > 0 then
          local waiting = waiting_units(flow, scope, window.unit)
          local same = waiting[1] == 0 or waiting[2] == waiting[3] and waiting[2] == cost
          largest[i] = max(waiting[3], cost)
          alike = alike and same
          exact = exact and same and window.kind == 's'
          low, high = starts_in(flow, scope, i, at, costs, behind, all_first, waiting, same)
        elseif scope.upstream then
          low = upstream().fits_at(scope, window, scope.states[i], at, at, 0, 0)
          high = low
        end
        if fits then fits[i] = low > at and low or 0 end
        if low > least_time then least_time = low end
        if high > most_time then most_time = high end
      end
    end
    local position = behind or flow.n
    if (#call.windows > 1 or not alike) and most_time > at then
      if position > 0 then
        local after = latest_after_own(flow, list, at, by_window, largest, position, exact)
        most_time = max(most_time, after)
      end
      most_time = open_from(list, at, by_window, most_time)
      if exact then least_time = most_time end
    end
    return min(least_time, MOST), min(most_time, MOST)
  end

  -- alone tells whether all that waits is in this queue.
  local function alone(queue)
    for name, q in pairs(L.queues) do
      if name ~= queue and L.alive(q) then return false end
    end
    return true
  end

  -- Other flows may be held up at a narrower node for long. They all go first only if all windows
  -- have one scope, and all tickets one queue. Slots may be given back at any time.
  local function least_start(flow, list, at, costs, behind, low)
    if #list == 1 and not call.leases and alone(flow.queue) then return low end
    local least = at
    for s = 1, #list do
      local scope, of = list[s], list[s].of.windows
      for j = 1, #of do
        local i = of[j]
        local window, cost = call.windows[i], costs.windows[i]
        if not window.algorithm.release then
          local before = units_of(flow, window.unit)
          if behind then before = min(before, behind * cost) end
          least = max(least, windows.fits_window(scope, i, at, at, cost, before, 1))
        end
      end
    end
    return min(least, low)
  end

  local function joined(r, list, costs)
    for s = 1, #list do
      for unit, cost in pairs(costs.units) do
        local waiting = L.waiting[list[s].suffix .. ' ' .. unit .. ' ' .. r.queue]
        if waiting then
          waiting[1], waiting[4] = min(MOST, waiting[1] + cost), waiting[4] + 1
          if cost < waiting[2] then waiting[2] = cost end
          if cost > waiting[3] then waiting[3] = cost end
        end
      end
    end
  end

  return {expected = expected, least_start = least_start, joined = joined}
end
end
