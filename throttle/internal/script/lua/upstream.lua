-- upstream.lua: answers of the upstream about a scope. Its value has them in sections that follow the windows'
-- sections. Their labels begin with "!", and their payloads are fields (codec.lua).
--
--   !p      a pause: nothing is granted until `ends`. `tenant` made the call that was refused, `reporter` reported that
--           at the time `reported`, and `cause` is the upstream's word for it
--   !rUNIT  `left` units (below 0: none) are left until `resets`, by the answer to a call that was granted at the time
--           `at`. `grants` are later grants without an answer: "TIME/UNITS,...". They are noted after the reset too,
--           for the first answer of the next period
--   !a      how the scope adapts. After refusals grants are spread, until `spread`: they keep to a rate, and the next
--           one may go at `next`. The rate was cut at `cut`, and has grown since `from`: see rate_at. `peak` is a
--           little less than the refused rate, times PARTS. Before the first cut there is neither `peak` nor `from`,
--           and `cut` is when grants began to be spread. `refusals` counts those since `since`, each of a call
--           after the one before. The newest came at `last`, and the pause after it was `wait` us long.
--           Sources: additive increase, multiplicative decrease (Chiu, Jain: "Analysis of the Increase and
--           Decrease Algorithms", 1989); the increase is that of CUBIC (Ha, Rhee, Xu, 2008; RFC 9438)
--
-- Rates are parts of the published rate: that of the scope's windows of the shortest period. Their grants are spread.

local function new_upstream()
  local PAUSE, REST, ADAPTED = '!p', '!r', '!a'
  local PARTS = 1e12
  local KEEP, DIP = 15 / 16, 1 / 15 -- peak / refused rate; how far below the peak, as a part of it, the rate begins
  local GROWTH = 1e-4 -- how far the rate is from the peak one ten_calls before or after it: see rate_at
  local FLOOR = 1 / 64 -- the lowest rate
  local SPREAD = 60 -- times ten_calls, for which grants are spread after a refusal
  local SECOND, MINUTE = 1000000, 60000000
  local LATE = 20000 -- us by which late requests may catch up
  local GRANTS = 1500 -- bytes of `grants`: older grants count as answered

  -- state_of returns the fields of a section, or false if there is none or it has expired.
  local function state_of(scope, label, now)
    local section = scope.sections and scope.sections[label]
    if not section or section.expires <= now then return false end
    section.state = section.state or cjson.decode(section.payload)
    return section.state
  end

  local function set_section(scope, label, expires, state)
    scope.sections = scope.sections or {}
    scope.sections[label] = {expires = ceil(expires), state = state}
  end

  -- shortest returns the state of the first window of the scope's shortest period, the time in which the window grants
  -- ten calls of one unit, between a second and a minute, and its number. It returns nil if no window has a period.
  local function shortest(scope)
    local st, number
    for _, i in ipairs(scope.spec.windows) do
      local period = scope.states[i].stated
      if period and (not st or period < st.stated) then st, number = scope.states[i], i end
    end
    if not st then return nil end
    return st, min(max(10 * st.every, SECOND), MINUTE), number
  end

  -- rate_at returns the rate at a time: it grows fast at first, slowly around the peak, and faster beyond. `t` is the
  -- time since it was at the peak, below 0 before that, in ten_calls. At `from` the rate is peak * (1 - DIP).
  local function rate_at(adapted, now, ten_calls)
    if not adapted.peak then return 1 end
    local peak = adapted.peak / PARTS
    local t = max(0, now - adapted.from) / ten_calls - (peak * DIP / GROWTH) ^ (1 / 3)
    return max(FLOOR, min(1, peak + GROWTH * t * t * t))
  end

  -- adapt notes a refusal, after the last one, of a call granted at `at`. It returns how long the pause is, and whether
  -- the rate was cut or grants begin to be spread. The pause is `wait` or, with a `most_guess`, a guess of at most
  -- that: while refusals go on, twice the last pause.
  local function adapt(scope, now, at, wait, most_guess)
    local st, ten_calls = shortest(scope)
    local known, span = state_of(scope, ADAPTED, now), min(st.stated, MINUTE)
    if most_guess then
      local goes_on = known and now < known.last + known.wait + span / 2
      wait = min(ceil(goes_on and min(2 * known.wait, span) or min(span / 8, SECOND)), most_guess)
    end
    local a = known or {cut = now, since = now, refusals = 0, next = 0}
    local cuts = known and at > a.cut + span / 2 -- at most one cut in half a span
    if cuts then a.peak, a.cut, a.from = floor(rate_at(a, now, ten_calls) * KEEP * PARTS), now, now + wait end
    a.last, a.wait, a.refusals = now, wait, a.refusals + 1
    a.next, a.spread = max(a.next, now + wait), ceil(now + wait + SPREAD * ten_calls)
    set_section(scope, ADAPTED, a.spread, a)
    return wait, cuts or not known
  end

  -- charge_spread notes when the next grant may go after one with these costs.
  local function charge_spread(scope, adapted, costs, now)
    local shortest_st, ten_calls = shortest(scope)
    if not shortest_st then return end -- the policy has no rate any more
    local spacing = 0
    for _, i in ipairs(scope.spec.windows) do
      local st = scope.states[i]
      if st.stated == shortest_st.stated then spacing = max(spacing, costs[i] * st.every) end
    end
    if spacing == 0 then return end
    -- A request that comes late may catch up by LATE. Where the rate is cut, by less, such as 1 ms at a spacing
    -- of 100 ms, as the upstream may want calls to be apart.
    local rate = rate_at(adapted, now, ten_calls)
    spacing = spacing / rate
    local late = rate < 1 and min(LATE, 1e8 / spacing) or LATE
    adapted.next = ceil(max(adapted.next, now - late) + spacing)
  end

  -- fits_at returns when the upstream accepts `cost` units of window i after `ahead` others: at `from` or later.
  local function fits_at(scope, i, now, from, cost, ahead)
    local paused = state_of(scope, PAUSE, now)
    if paused then from = max(from, paused.ends) end
    if cost == 0 then return from end
    local adapted, rest = state_of(scope, ADAPTED, now), state_of(scope, REST .. call.windows[i].unit, now)
    if adapted then
      local st, shortest_st, ten_calls = scope.states[i], shortest(scope)
      if st.stated and st.stated == shortest_st.stated then -- this window's grants are spread
        local time = adapted.next
        if ahead > 0 then time = max(time, now) + ceil(ahead * st.every / rate_at(adapted, now, ten_calls)) end
        from = max(from, min(time, adapted.spread))
      end
    end
    if rest and from < rest.resets and rest.left < ahead + cost then from = rest.resets end
    return from
  end

  -- charge notes a grant, with its costs by window.
  local function charge(scope, costs, now)
    local adapted, units = state_of(scope, ADAPTED, now), {}
    if adapted then charge_spread(scope, adapted, costs, now) end
    for _, i in ipairs(scope.spec.windows) do
      if costs[i] > 0 then units[call.windows[i].unit] = costs[i] end
    end
    for unit, cost in pairs(units) do
      local rest = state_of(scope, REST .. unit, now)
      if rest then
        rest.left, rest.grants = rest.left - cost, rest.grants .. format('%d/%d,', now, cost)
        while #rest.grants > GRANTS do rest.grants = sub(rest.grants, find(rest.grants, ',', 1, true) + 1) end
      end
    end
  end

  -- correct notes that the costs, by window, of the grant at `at` have changed, unless an answer has counted it since.
  local function correct(scope, costs, changes, now, at)
    local done = {} -- by unit: several windows may have it
    for _, i in ipairs(scope.spec.windows) do
      local unit, change = call.windows[i].unit, changes[i]
      local rest = change ~= 0 and not done[unit] and state_of(scope, REST .. unit, now)
      if rest then
        local old, new, found = format('%d/%d,', at, costs[i]), format('%d/%d,', at, costs[i] + change), 0
        rest.grants, found = string.gsub(rest.grants, old, new, 1)
        if found > 0 then rest.left, done[unit] = rest.left - change, true end
      end
    end
  end

  -- pause notes a refusal. It returns whether that is news: the rate was cut, grants begin to be spread, or a pause
  -- began that was not guessed here.
  local function pause(scope, now, r)
    local refused, paused, adapted = r.refused, state_of(scope, PAUSE, now), state_of(scope, ADAPTED, now)
    local adapts, wait, at, changes = refused.adapt and shortest(scope), refused.wait, r.at, false
    local most_guess = adapts and refused.guess -- a number if it adapts, and the upstream did not say how long
    if at == 0 then -- not known: it counts as the last refusal's while the pause after that lasts, else as now
      at = adapted and now < adapted.last + adapted.wait and adapted.last or now
    end
    local is_new = not adapted or at > adapted.last -- of a call after the last refusal
    if adapts and is_new then wait, changes = adapt(scope, now, at, wait, most_guess) end
    if most_guess and not is_new then return false end -- the pause after the last refusal is for this one, too
    -- Exempt tenants call during a pause, and may be refused. The longest pause counts.
    if not paused or paused.ends < now + wait then
      set_section(scope, PAUSE, now + wait, {
        ends = now + wait, reported = now, tenant = refused.tenant, cause = refused.cause, reporter = refused.reporter,
      })
    end
    return changes or not paused and not most_guess
  end

  -- add_to_answer adds to an answer what it has not from other scopes: the longest pause; the lowest adapted rate, with
  -- its window, in millionths of the published rate; and the fewest units left.
  local function add_to_answer(scope, now, answer)
    local paused, adapted = state_of(scope, PAUSE, now), state_of(scope, ADAPTED, now)
    if paused and (not answer.pause or paused.ends > answer.pause.ends) then answer.pause = paused end
    for _, w in ipairs(scope.spec.windows) do
      local rest = state_of(scope, REST .. call.windows[w].unit, now)
      if rest and rest.resets > now and (not answer.left or rest.left < answer.left.units) then
        answer.left = {unit = call.windows[w].unit, units = max(0, rest.left), reset = rest.resets}
      end
    end
    local st, ten_calls, number = shortest(scope)
    local rate = adapted and st and floor(rate_at(adapted, now, ten_calls) * 1e6)
    if rate and (not answer.adapted or rate < answer.adapted.rate) then
      answer.adapted = {
        since = adapted.since, refusals = adapted.refusals, cut = adapted.cut, spread = adapted.spread,
        rate = rate, window = number,
      }
    end
  end

  -- unanswered returns the grants from `at` on, less the cost of the answered call, and the sum of their units: of
  -- "10/5,20/3,30/2," at 20 and a cost of 1 "20/2,30/2,", and 4.
  local function unanswered(grants, at, cost)
    local left, sum = {}, 0
    for time, units in gmatch(grants, '(%d+)/(%d+),') do
      time, units = time + 0, units + 0
      local answered = time == at and min(units, cost) or 0
      units, cost = units - answered, cost - answered
      if time >= at and units > 0 then left[#left + 1], sum = format('%d/%d,', time, units), sum + units end
    end
    return concat(left), sum
  end

  -- remaining notes the units that the upstream has left, by the answer to a call granted at r.at. It ignores an
  -- answer to a call before the one answered last. Of answers to calls of the same time, the least counts.
  local function remaining(scope, now, r)
    local left, at = r.left, r.at > 0 and r.at or now
    local rest, resets = state_of(scope, REST .. left.unit, now), now + left.reset
    if rest and at < rest.at then return end
    local cost, grants, most = 0, rest and rest.grants or '', 0
    for _, i in ipairs(scope.spec.windows) do
      local window = call.windows[i]
      if window.unit == left.unit then
        cost = r.costs[i]
        local log = not rest and window.algorithm.grants and window.algorithm.grants(scope.states[i], at) or ''
        local _, units = unanswered(log, at, 0)
        if units > most then grants, most = log, units end -- before a first answer only the log knows them
      end
    end
    local later_grants, under_way = unanswered(grants, at, cost)
    local units = left.units - under_way
    if rest and at == rest.at and now < rest.resets then units = min(units, rest.left) end
    local state = {left = units, at = at, resets = resets, grants = later_grants}
    set_section(scope, REST .. left.unit, resets + left.reset, state)
  end

  -- resume ends the pause, and restores the published rate.
  local function resume(scope)
    set_section(scope, PAUSE, 0, {})
    set_section(scope, ADAPTED, 0, {})
  end

  return {
    fits_at = fits_at, charge = charge, correct = correct, pause = pause, resume = resume, remaining = remaining,
    add_to_answer = add_to_answer,
  }
end

local function upstream() return made_once(new_upstream) end
