-- line_eta.lua: when a ticket is expected to start, and when at the latest.
--
-- new_eta(L) -> expected, a function:
--   expected(flow, list, from, costs, position, all_first, fits) -> expected, latest, binds, earliest
--     of a ticket with these costs after all tickets of the flow, or after `position` of them. list are the
--     flow's scopes, and `from` is their time. all_first: all tickets that wait at the scopes go first, as for
--     a request without a ticket. fits, if any, gets by window when the costs fit there, 0 for at once
--
-- Until a ticket starts, the first of all waiting tickets lacks room in a window. So the latest start is the sum of the
-- windows' waits, if all tickets go first that may, plus resets missed in one window while another delays tickets. It
-- is 0 if it is unknown how long leases are held. binds is the number of the window that delays the ticket for
-- longest, or 0. The earliest start is after the flow's own tickets alone: others may be gone by then.
--
-- Where all that waits fits now, so does the ticket. Where costs differ, windows are left with room that is too small
-- for the next ticket: expected and latest assume the most of such room. So they are equal only where the start is
-- exact: one window binds, costs are equal, and no other ticket may overtake this one.

local function new_eta(L)
  local PACED = 60000000 -- us, the longest period of windows over which batches are spread
  local MANY = 64        -- the most tickets of one call

  local call, units_of = L.call, line_units.of_unit
  local roomy = {} -- by scope: costs of which MANY fit besides all that waits, until the scope changes

  -- waiting returns the units that wait at a scope in a class's queues that are alive, and a ticket's most and least.
  local function waiting(flow, scope, unit, batch)
    local sum, least, most = 0, MOST, 0
    for name, q in pairs(L.queues) do
      if q.batch == batch and (name == flow.queue or L.alive(q)) then
        local tickets = L.tickets_at(name, scope, flow)
        if tickets and tickets.n > 0 then
          local units, of_least, of_most = units_of(tickets, unit)
          sum, least, most = sum + units, min(least, of_least), max(most, of_most)
        end
      end
    end
    return sum, most, least
  end

  -- flow_units returns the units of a flow's first `position` tickets, nil for all: at least, about, and at most.
  local function flow_units(flow, unit, position)
    local sum, least, most = units_of(flow, unit)
    if position == nil or position >= flow.n then return sum, sum, sum end
    return min(sum, position * least), ceil(sum * position / flow.n), min(sum, position * most)
  end

  -- share_of_others returns the units that other flows of the class take at shared scopes while the flow takes one,
  -- as sides share (line_order.lua). It also returns the number of these flows, MOST where several queues wait.
  local function share_of_others(flow)
    local queue, new = L.queue_of(flow.queue), flow.n == 0
    local weights, flows = queue.weights + (new and flow.weight or 0), queue.flows - (new and 0 or 1)
    local all, of_server, priorities = weights, weights, queue.priority
    for name, q in pairs(L.queues) do
      if q.batch == flow.batch and name ~= flow.queue and L.alive(q) then
        all, flows = all + q.weights, MOST
        if q.server == queue.server then
          of_server, priorities = of_server + q.weights, priorities + q.priority
        end
      end
    end
    return max(0, weights / flow.weight * all / of_server * priorities / queue.priority - 1), flows
  end

  -- ahead_of returns how many of the `sum` units of the flow's class go first at a scope: at least, about, and
  -- at most. No ticket costs more than `largest`.
  local function ahead_of(flow, scope, unit, cost, position, sum, largest, all_first, one_scope)
    local least, about, most = flow_units(flow, unit, position)
    local others = sum - units_of(flow, unit)
    if others == 0 or all_first or scope.spec.of_tenant then return least, about + others, most + others end
    local share, flows = share_of_others(flow)
    local most_others = one_scope and min(others, ceil((about + largest) * share) + flows * largest) or others
    return least, about + min(others, floor(about * share + 1e-6) + ceil(share) * cost), most + most_others
  end

  -- other_class returns how many of the `sum` units of the other class go first, while `units` of the flow's class
  -- go. For a batch these are all; for a live ticket the share of batches, `idle` units and one ticket of a batch.
  local function other_class(flow, sum, most, units, idle)
    if flow.batch or sum == 0 then return sum end
    return min(sum, ceil(units * call.batch_share / (1 - call.batch_share)) + most + idle)
  end

  -- let_in returns the scopes as they will be when the upstream lets in a ticket with these costs, and that time.
  -- The wait until then counts only at scopes with an upstream's answer: see `since`.
  local function let_in(list, at, costs)
    local time = at
    for s = 1, #list do
      for _, i in ipairs(list[s].sections and list[s].spec.windows or {}) do
        time = max(time, upstream().fits_at(list[s], i, at, at, costs.windows[i], 0))
      end
    end
    return time > at and scopes.later(list, time) or list, time
  end

  return function(flow, all_scopes, from, costs, position, all_first, fits) -- `expected`, as above
    local list, at = let_in(all_scopes, from, costs)
    local batch, one_scope = flow.batch, call.only_tenants and not list[2] -- the policy has only one
    local time, earliest, waits, binds, known, blocking, elapsed = from, at, 0, 0, true, 0, 0
    for i = 1, fits and #call.windows or 0 do fits[i] = 0 end
    for s = 1, #list do
      local scope, numbers = list[s], list[s].spec.windows
      local look = scope.changed or roomy[scope] ~= costs
      local room, since = not scope.sections and not call.batches, scope.sections and from or at
      for j = 1, look and #numbers or 0 do
        local i = numbers[j]
        local window, st, cost = call.windows[i], scope.states[i], costs.windows[i]
        local algorithm, unit, limit = window.algorithm, window.unit, st.limit
        local idle = list[2] and limit or 0 -- live tickets may leave all of it to batches while they wait at other scopes
        local sum, most, least = waiting(flow, scope, unit, batch)
        local other, other_most = 0, 0
        if call.batches then other, other_most = waiting(flow, scope, unit, not batch) end
        local all = sum + other_class(flow, other, other_most, sum + cost, idle)
        room = room and (cost + all == 0 or algorithm.fits_at(st, at, cost, all + MANY * cost, 1) <= at)
        if scope.sections or batch or
          (not room and cost + all > 0 and algorithm.fits_at(st, at, cost, all, 1) > at) then -- else all fits now
          local fits_window, largest = windows.fits_window, max(most, other_most, cost)
          local least_before, ahead, most_ahead =
            ahead_of(flow, scope, unit, cost, position, sum, largest, all_first, one_scope)
          ahead = ahead + other_class(flow, other, other_most, ahead + cost, 0)
          most_ahead = most_ahead + other_class(flow, other, other_most, most_ahead + cost, idle)
          local each, pace, pace_most = 1, 0, 0
          if batch and st.period and st.period <= PACED then
            pace = at + ceil(ahead * st.period / limit)
            pace_most = ceil((most_ahead + cost) / limit + 2) * st.period
          end
          if other == 0 and (sum == 0 or least == most and least == cost) then
            each = cost
          elseif not algorithm.drains then -- a ticket that waits for its cost leaves less than that unused
            local used = max(1, limit - largest + 1, limit / 2)
            ahead, most_ahead = ceil(ahead * limit / used), ceil(most_ahead * limit / used)
          end
          local late = (largest > 0 and algorithm.fits_at(st, at, largest, most_ahead, each) or at) + pace_most
          local delay = scope.sections and upstream().fits_at(scope, i, at, at, largest, most_ahead) - at or 0
          if delay > 0 then late = late + delay + (late > at and st.gap or 0) end -- the window fills up after it
          local fit = max(pace, fits_window(scope, i, at, cost, ahead, each))
          if algorithm.release then
            local leases, fits_at = st.present or st, algorithm.fits_at -- leases may be renewed
            known = known and (leases.hold > 0 or largest == 0 or fits_at(leases, at, largest, most_ahead, each) <= at)
          else
            earliest = max(earliest, cost > 0 and algorithm.fits_at(st, at, cost, least_before, each) or at)
          end
          waits = waits + late - at
          if late > at then blocking = blocking + 1 end
          if st.resets and late > at then
            elapsed = elapsed + at - st.resets[1] - st.margin
            if st.margin > 0 then elapsed = elapsed + late - at end -- they may count on both sides of a reset
          end
          if fit > max(time, since) then time, binds = fit, i end
          if fits and fit > since then fits[i] = fit end
        end
      end
      if look then roomy[scope] = room and costs end
    end
    time = min(time, MOST)
    if blocking > 1 then waits = waits + elapsed end -- tickets delayed elsewhere come into the next bucket
    local latest = min(MOST, max(time, at + waits))
    if time == latest and earliest < time and not all_first then latest = latest + 1 end -- the start is not exact
    return time, known and latest or 0, binds, min(earliest, time)
  end
end
