-- line_eta.lua: when a ticket is expected to start, and when at the latest.
--
-- new_eta(L) -> expected, a function:
--   expected(flow, list, at, costs, behind, all_first, fits) -> expected, latest, binds, earliest, wasted
--     for costs that stand behind all tickets of the flow, or behind `behind` of them
--     list       the flow's scopes, at: their time
--     all_first  all tickets that wait at the scopes go first
--     fits       gets by window when the costs fit there, 0 for at once; nil: nobody asks
--   and returns
--     expected   the longest wait of a window: behind the units of the flow, what others take
--                meanwhile by their weights, and the room that tickets leave as they do not fit in
--     latest     until the ticket starts, one of its windows has no room for the ticket that is first
--                there. So it is the sum of their waits, if all that may go first does, and wastes as
--                much as it can. 0: nobody knows how long slots are held
--     binds      the number of the window that holds it up for longest; 0 if none does
--     earliest   the wait for the flow's own tickets, as others may be out of tickets; slots may be
--                given back at any time
--     wasted     by unit, the room that the flow leaves with this ticket (line_units.lua)
-- Expected and latest are equal only where the start is exact: one window binds, costs are equal, and
-- no other ticket may change places with this one.
--
-- Where all that waits fits now, so does the ticket.

local function new_eta(L)
  local SHARE = 0.05     -- of Policy.BatchShare: Go writes that of the policy here
  local PACED = 60000000 -- us: batches are spread over windows of at most this period
  local READ = 64        -- tickets that are read to know what they cost
  local MANY = 64        -- tickets that one call has, at most

  local call, units_of, roomy = L.call, line_units.of_unit, {}

  -- others_waiting returns how much waits at a scope in other queues that are alive, of one class:
  -- {units, least, most of a ticket}. L.waiting keeps it while tickets of one queue join.
  local function others_waiting(flow, scope, unit, batch)
    if L.waiting.queue ~= flow.queue then L.waiting = {queue = flow.queue} end
    local own_only = call.only_tenants and scope.of.of_tenant
    local key = scope.suffix .. (batch and '! ' or ' ') .. unit
    local known = L.waiting[key]
    if known then return known end
    known = {0, MOST, 0}
    for name, q in pairs(L.queues) do
      if q.batch == batch and name ~= flow.queue and L.alive(q) then
        local tickets = own_only and L.flow_of(name .. flow.values) or L.node_of(name, scope.suffix)
        if tickets.n > 0 then
          local sum, least, most = units_of(tickets, unit)
          known[1], known[2], known[3] = known[1] + sum, min(known[2], least), max(known[3], most)
        end
      end
    end
    L.waiting[key] = known
    return known
  end

  -- waiting returns how much waits at a scope: units, least and most of a ticket. Batches do not count
  -- for live tickets.
  local function waiting(flow, scope, unit)
    local own_only, queues = call.only_tenants and scope.of.of_tenant, L.queues
    local sum, least, most = units_of(own_only and flow or L.node_of(flow.queue, scope.suffix), unit)
    local first = next(queues)
    if first == nil or first == flow.queue and next(queues, first) == nil then return sum, least, most end
    for class = 0, flow.batch and 1 or 0 do
      local others = others_waiting(flow, scope, unit, class == 1)
      sum, least, most = sum + others[1], min(least, others[2]), max(most, others[3])
    end
    return sum, least, most
  end

  -- room_for_all tells whether there is room for a ticket and all that waits. If there is for as many
  -- tickets as a call has, no other ticket of the same costs asks.
  local function room_for_all(flow, list, at, costs)
    if roomy.costs ~= costs then roomy = {costs = costs} end
    for s = 1, #list do
      local scope = list[s]
      local room, numbers = roomy[scope], scope.of.windows
      if room == nil or scope.changed then
        room = not scope.upstream
        for j = 1, #numbers do
          local window, st = call.windows[numbers[j]], scope.states[numbers[j]]
          local cost = costs.windows[numbers[j]]
          local ahead = waiting(flow, scope, window.unit) + (MANY - 1) * cost
          room = room and (ahead <= 0 or window.algorithm.fits_at(st, at, at, cost, ahead, 1) <= at)
        end
        roomy[scope] = room
      end
      if not room then return false end
    end
    return true
  end

  -- of_batches returns what batches take, by their share, while live tickets take so many units; and
  -- `idle` units that live tickets leave while they wait elsewhere.
  local function of_batches(flow, scope, unit, units, idle)
    if not call.batches or flow.batch then return 0 end
    local others = others_waiting(flow, scope, unit, true)
    return min(others[1], ceil(units * SHARE / (1 - SHARE)) + others[3] + idle)
  end

  -- of_others returns how many units others of its class take at a shared scope before a ticket
  -- that has `before` units of its own flow ahead: expected, and the most. By fairness each
  -- takes its share, and up to one ticket more, or where weights differ less.
  local function of_others(flow, scope, costs, cost, largest, before)
    local queue, new = L.queues[flow.queue] or {weights = 0, flows = 0, priority = 1}, flow.n == 0
    local weights, flows = queue.weights + (new and flow.weight or 0), queue.flows - (new and 0 or 1)
    local all, of_server, priorities, alone = weights, weights, queue.priority, true
    for name, q in pairs(L.queues) do -- sides share as line_order.lua says
      if q.batch == flow.batch and name ~= flow.queue and L.alive(q) then
        all, flows, alone = all + q.weights, flows + q.flows, false
        if q.server == queue.server then
          of_server, priorities = of_server + q.weights, priorities + q.priority
        end
      end
    end
    local share_of_side = of_server / all * queue.priority / priorities
    local others = max(0, weights / flow.weight / share_of_side - 1)
    local node = L.node_of(flow.queue, scope.suffix)
    local fair = once(new_fair, L)
    local debt = max(0, fair.tag_of(node, flow) - node.v) * flow.weight / 1000 / fair.share(node, costs)
    local share = floor((before + debt * cost) * others + 1e-6)
    local expected = share + ceil(others) * cost
    return expected, alone and expected + flows * largest or MOST
  end

  -- first_units returns what the first tickets of a flow cost. Of more than READ it knows the sum only:
  -- the others cost as much as they do on average, and no more than the largest.
  local function first_units(flow, unit, behind)
    local sum, _, most = units_of(flow, unit)
    if behind == nil or behind >= flow.n then return sum, sum end
    if flow.same then return most * behind, most * behind end
    L.flush()
    local known, n = 0, min(behind, READ)
    local ids = n > 0 and redis.call('ZRANGE', call.P .. 'f:' .. flow.id, '0', format('%d', n - 1)) or {}
    L.read_all('t', ids)
    for i = 1, #ids do
      local _, text = L.ticket(ids[i])
      known = known + (text and windows.costs_of(call, text).units[unit] or 0)
    end
    local left = max(0, sum - known)
    local about = known + ceil(left * (behind - n) / max(1, flow.n - n))
    return about, known + min(left, (behind - n) * most)
  end

  -- least_limit returns the least limit of a unit at these scopes. What tickets waste is known for it.
  local function least_limit(list, unit)
    local least = MOST
    for s = 1, #list do
      for _, i in ipairs(list[s].of.windows) do
        if call.windows[i].unit == unit then least = min(least, list[s].states[i].limit) end
      end
    end
    return least
  end

  -- room_left returns the room that a flow's tickets leave of a window, as each has to fit whole:
  -- `before` units, and then one that costs so much. Wider windows waste as much each time, less often.
  local function room_left(flow, st, unit, before, cost, narrowest)
    local sum, each, _, left = units_of(flow, unit)
    local limit = st.limit
    if flow.same and each > 0 then
      local whole = max(1, floor(narrowest / each))
      left = floor(sum / each / whole) * max(0, narrowest - whole * each)
    end
    left = left * narrowest / limit
    if before < sum then left = left * before / sum end
    -- The first one does not fit beside what was taken: the rest of that is wasted, too.
    local used = min(st.used, limit)
    local rest = before > 0 and used > 0 and limit - used or 0
    local room = limit - (used + rest + before + left) % limit
    return ceil(cost > room and left + room or left), rest
  end

  return function(flow, list, at, costs, behind, all_first, fits)
    for i = 1, fits and #call.windows or 0 do fits[i] = 0 end
    if not call.batches and room_for_all(flow, list, at, costs) then return at, at, 0, at end
    local batch, wasted = flow.batch, nil
    local time, earliest, opens, waits, binds, known = at, at, at, 0, 0, true
    for s = 1, #list do
      local scope = list[s]
      for _, i in ipairs(scope.of.windows) do
        local window, st, cost = call.windows[i], scope.states[i], costs.windows[i]
        local algorithm, unit, fit = window.algorithm, window.unit, at
        local sum, least, most = waiting(flow, scope, unit)
        local idle = list[2] and st.limit or 0
        local more = of_batches(flow, scope, unit, sum + cost, idle)
        -- Where all that waits fits now, so does the ticket.
        if scope.upstream or batch or
          cost + sum > 0 and algorithm.fits_at(st, at, at, cost, sum + more, 1) > at then
          local fits_window, largest = windows.fits_window, max(most, cost)
          local before, most_before = first_units(flow, unit, behind)
          local others = sum - units_of(flow, unit)
          local about, most_others = others, others
          if not scope.of.of_tenant and not all_first and others > 0 then
            local by_share, at_most = of_others(flow, scope, costs, cost, largest, before)
            local live = batch and others_waiting(flow, scope, unit, false)[1] or 0 -- all goes first
            about = min(others, by_share + live)
            if call.only_tenants and not list[2] then
              most_others = min(others, at_most + live)
            end
          end
          local ahead, most_ahead = before + about, most_before + most_others
          ahead = ahead + of_batches(flow, scope, unit, ahead + cost, 0)
          most_ahead = most_ahead + of_batches(flow, scope, unit, most_ahead + cost, idle)
          local same = more == 0 and (sum == 0 or least == most and least == cost)
          local each = same and cost or 1
          local open = scope.upstream and fits_window(scope, i, at, at, 0, 0, 1) or at
          local late = open
          fit = open
          if cost > 0 then
            if not same and not algorithm.drains then
              local narrowest = least_limit(list, unit)
              local left, rest = room_left(flow, st, unit, before, cost, narrowest)
              if st.limit == narrowest then
                wasted = wasted or {}
                wasted[unit] = left
              end
              local wasted_each = before > 0 and left / before or most / 4 / st.limit
              ahead = ahead + left + rest + ceil(about * wasted_each)
            end
            fit = fits_window(scope, i, at, at, cost, ahead, each)
            if batch and st.period and st.period <= PACED then
              fit = max(fit, at + ceil(ahead * st.period / st.limit))
            end
          end
          if cost + before > 0 or not scope.of.of_tenant and sum > 0 then
            local units = most_ahead
            if not same and not algorithm.drains then
              units = ceil(units * st.limit / max(1, st.limit - largest + 1, st.limit / 2))
            end
            late = fits_window(scope, i, at, at, largest, units, each)
            if batch and st.period and st.period <= PACED then
              late = late + ceil((most_ahead + cost) / st.limit + 2) * st.period
            end
          end
          if algorithm.release then
            known = known and (st.hold > 0 or late <= at)
          else
            earliest = max(earliest, fits_window(scope, i, at, at, cost, before, each))
          end
          opens, waits = max(opens, open), waits + late - open
          if fit > time then time, binds = fit, i end
        end
        if fits and fit > at then fits[i] = fit end
      end
    end
    time = min(time, MOST)
    local latest = min(MOST, max(time, opens + waits))
    if time == latest and earliest < time and not all_first then latest = latest + 1 end -- it is not exact
    return time, known and latest or 0, binds, min(earliest, time), wasted
  end
end
