-- line_eta.lua: when a ticket is expected to start, and when at the latest.
--
-- new_eta(L) -> forecast, a function: forecast(ticket, list, from, fits) -> answer, earliest
--   ticket    {flow, costs, position, all_first}: it goes after `position` tickets of its flow, or after all if that is
--             nil. all_first: all others at its scopes go first, as for a request without a ticket
--   list      its scopes; `from` is their time
--   fits      if any, gets by window when the costs fit there, 0 for at once
--   answer    (request_more.lua) binds: the number of the window that delays the ticket for longest, if one does
--   earliest  when it starts if only tickets of its own flow go first, as others may be gone by then
--
-- If all that waits fits now, so does the ticket. Else, while it waits, the first of all waiting tickets lacks room in
-- some window. So it waits at most for the sum of what each window alone would make it wait, if all tickets go first
-- that may; plus resets that one window misses while another one delays tickets. The latest start is 0 if nobody knows
-- how long leases are held. Where costs differ, both times assume that windows that do not drain are left with room
-- too small for the next ticket. The times are equal only if the start is exact: one window binds, costs are equal,
-- and no other ticket may overtake this one.

local function new_eta(L)
  local call, units_of = L.call, line_units.of_unit
  local roomy = {} -- by scope: costs of which a call's most tickets, 64, fit besides all that waits, until it changes

  -- The units that wait for a window, in the flow's queue and those that are alive. `demand` is one table, which
  -- set_demand fills for each window, as a new one would cost time.
  local demand = {
    unit = false, cost = 0, idle = 0, -- of the window; what the ticket costs; what live tickets may leave to batches
    sum = 0, least = 0, most = 0,     -- of the flow's class, with the least and the most cost of one ticket
    other = 0, other_most = 0,        -- of the other class, with the most cost of one ticket
    all = 0, largest = 0,             -- all that may go before the ticket; the most cost of any ticket
  }

  -- other_class returns how many units of the other class go first, while `units` of the flow's class go. For a
  -- batch these are all; for a live ticket the share of batches, `idle` units and one ticket of a batch.
  local function other_class(flow, units, idle)
    local other = demand.other
    if flow.batch or other == 0 then return other end
    return min(other, ceil(units * call.batch_share / (1 - call.batch_share)) + demand.other_most + idle)
  end

  -- set_demand sets `demand` for window i of a scope.
  local function set_demand(ticket, scope, i, idle)
    local flow, unit, cost = ticket.flow, call.windows[i].unit, ticket.costs.windows[i]
    local sum, least, most, other, other_most = 0, MOST, 0, 0, 0
    for name, q in pairs(L.queues) do
      local tickets = (name == flow.queue or L.alive(q)) and L.tickets_at(name, scope, flow)
      if tickets and tickets.n > 0 then
        local units, of_least, of_most = units_of(tickets, unit)
        if q.batch == flow.batch then
          sum, least, most = sum + units, min(least, of_least), max(most, of_most)
        else
          other, other_most = other + units, max(other_most, of_most)
        end
      end
    end
    demand.unit, demand.cost, demand.idle = unit, cost, idle
    demand.sum, demand.least, demand.most, demand.other, demand.other_most = sum, least, most, other, other_most
    demand.largest = max(most, other_most, cost)
    demand.all = sum + other_class(flow, sum + cost, idle)
  end

  -- flow_units returns the units of a flow's first `position` tickets, nil for all: at least, about, and at most.
  local function flow_units(flow, position)
    local units, of_least, of_most = units_of(flow, demand.unit)
    if position == nil or position >= flow.n then return units, units, units end
    return min(units, position * of_least), ceil(units * position / flow.n), min(units, position * of_most)
  end

  -- share_of_others returns the units that other flows of the class take at shared scopes while the flow takes one,
  -- as sides share (line_order.lua). It also returns the number of these flows, MOST where several queues wait.
  local function share_of_others(flow)
    local queue, new = L.queue_of(flow.queue), flow.n == 0
    local weights, flows = queue.weights + (new and flow.weight or 0), queue.flows - (new and 0 or 1)
    local of_all, of_server, priorities = weights, weights, queue.priority
    for name, q in pairs(L.queues) do
      if q.batch == flow.batch and name ~= flow.queue and L.alive(q) then
        of_all, flows = of_all + q.weights, MOST
        if q.server == queue.server then
          of_server, priorities = of_server + q.weights, priorities + q.priority
        end
      end
    end
    local units = weights / flow.weight                -- of the queue, for one of the flow: flows share by weight;
    units = units * priorities / queue.priority        -- of the server: its queues share by priority;
    units = units * of_all / of_server - 1             -- of all servers, by their flows' weights; less the flow's one
    return max(0, units), flows
  end

  -- ahead_of returns how many units of the flow's class go first at a scope: at least, about, and at most. Where flows
  -- of equal weight have 2 and 6 tickets of one unit, a third one of the first flow goes after 2 at least, as others
  -- may leave; after about 5, as flows take turns; and after 6 at most, if the policy has one scope.
  local function ahead_of(ticket, scope, one_scope)
    local flow, largest = ticket.flow, demand.largest
    local at_least, about, at_most = flow_units(flow, ticket.position)
    local others = demand.sum - units_of(flow, demand.unit)
    if others == 0 or ticket.all_first or scope.spec.of_tenant then
      return at_least, about + others, at_most + others
    end
    local share, flows = share_of_others(flow)
    local in_turn = floor(about * share + 1e-6) + ceil(share - 1e-6) * demand.cost -- while the flow's units go
    local most = one_scope and min(others, ceil((about + largest) * share) + flows * largest) or others
    return at_least, about + min(others, in_turn), at_most + most
  end

  -- let_in returns the scopes as they will be when the upstream lets in a ticket with these costs, and that time.
  -- A scope without an upstream's answer causes none of this wait: forecast leaves it out there, by `since`.
  local function let_in(list, at, costs)
    local time = at
    for s = 1, #list do
      for _, i in ipairs(list[s].sections and list[s].spec.windows or {}) do
        time = max(time, upstream().fits_at(list[s], i, at, at, costs.windows[i], 0))
      end
    end
    return time > at and scopes.later(list, time) or list, time
  end

  -- delays returns when the ticket fits window i, after set_demand for it: as expected, at the latest, and at the
  -- earliest; and whether the latest time is an upper bound, as it is known how long leases are held.
  local function delays(ticket, scope, i, at, one_scope)
    local st, algorithm, batch = scope.states[i], call.windows[i].algorithm, ticket.flow.batch
    local limit, fits_at, cost, largest = st.limit, algorithm.fits_at, demand.cost, demand.largest
    local least_ahead, ahead, most_ahead = ahead_of(ticket, scope, one_scope)
    ahead = ahead + other_class(ticket.flow, ahead + cost, 0)
    most_ahead = most_ahead + other_class(ticket.flow, most_ahead + cost, demand.idle)
    local each, pace, pace_most = 1, 0, 0 -- of a batch that is spread: its time, and the most us that this adds
    if batch and st.period and st.period <= PACED then
      pace = at + ceil(ahead * st.period / limit)
      pace_most = ceil((most_ahead + cost) / limit + 2) * st.period
    end
    if demand.other == 0 and (demand.sum == 0 or demand.least == demand.most and demand.least == cost) then
      each = cost
    elseif not algorithm.drains then -- a ticket that waits for its cost leaves less than that unused
      local used = max(1, limit - largest + 1, limit / 2)
      ahead, most_ahead = ceil(ahead * limit / used), ceil(most_ahead * limit / used)
    end
    local late = (largest > 0 and fits_at(st, at, largest, most_ahead, each) or at) + pace_most -- any may be first
    local delay = scope.sections and upstream().fits_at(scope, i, at, at, largest, most_ahead) - at or 0
    if delay > 0 then late = late + delay + (late > at and st.gap or 0) end -- full again at its end: one reset more
    local fit, earliest, bounded = max(pace, windows.fits_window(scope, i, at, cost, ahead, each)), at, true
    if algorithm.release then
      local leases = st.present or st -- they may be renewed
      bounded = leases.hold > 0 or largest == 0 or fits_at(leases, at, largest, most_ahead, each) <= at
    elseif cost > 0 then
      earliest = fits_at(st, at, cost, least_ahead, each)
    end
    return fit, late, earliest, bounded
  end

  return function(ticket, all_scopes, from, fits) -- `forecast`, as above
    local costs, batch = ticket.costs, ticket.flow.batch
    local list, at = let_in(all_scopes, from, costs)
    local one_scope = call.only_tenants and not list[2] -- the policy has only one
    local time, binds, earliest = from, nil, at
    local waits, all_bounded, blocking, missed = 0, true, 0, 0 -- us, of `blocking` windows; and us by missed resets
    for i = 1, fits and #call.windows or 0 do fits[i] = 0 end
    for s = 1, #list do
      local scope = list[s]
      local is_roomy = not scope.changed and roomy[scope] == costs -- it delays nothing, and need not be looked at
      local many_fit, since = not scope.sections and not call.batches, scope.sections and from or at
      for _, i in ipairs(is_roomy and {} or scope.spec.windows) do
        local st, fits_at = scope.states[i], call.windows[i].algorithm.fits_at
        set_demand(ticket, scope, i, list[2] and st.limit or 0) -- a limit's worth: tickets may wait at other scopes
        local cost, all = demand.cost, demand.all
        local all_fit = cost + all == 0 or fits_at(st, at, cost, all, 1) <= at
        many_fit = many_fit and all_fit and fits_at(st, at, cost, all + 64 * cost, 1) <= at
        if not all_fit or scope.sections or batch then
          local fit, late, soonest, bounded = delays(ticket, scope, i, at, one_scope)
          all_bounded, earliest, waits = all_bounded and bounded, max(earliest, soonest), waits + late - at
          if late > at then
            blocking = blocking + 1
            if st.resets then -- its bucket's part that is over; and the wait, if units may count in two buckets
              missed = missed + at - st.resets[1] - st.margin + (st.margin > 0 and late - at or 0)
            end
          end
          if fit > max(time, since) then time, binds = fit, i end
          if fits and fit > since then fits[i] = fit end
        end
      end
      if not is_roomy then roomy[scope] = many_fit and costs end
    end
    time = min(time, MOST)
    if blocking > 1 then waits = waits + missed end -- tickets delayed elsewhere come into the next bucket
    local latest = min(MOST, max(time, at + waits))
    local is_exact = earliest >= time or ticket.all_first
    if time == latest and not is_exact then latest = latest + 1 end
    local answer = new_answer(time, all_bounded and latest or 0)
    answer.binds = binds
    return answer, min(earliest, time)
  end
end
