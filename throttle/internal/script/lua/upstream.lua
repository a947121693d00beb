-- upstream.lua: answers of the upstream about a scope. Its value has them in sections that follow the windows'
-- sections. Their labels begin with "!", and their payloads are fields (codec.lua).
--
--   !p      a pause: nothing is granted until `ends`. `tenant` made the call that was refused, `reporter` reported that
--           at the time `reported`, and `cause` is the upstream's word for it
--   !rUNIT  `left` units (below 0: none) are left until `resets`, by the answer to a call that was granted at the time
--           `at`. `grants` are later grants without an answer: "TIME/UNITS,...". They are noted after the reset too,
--           for the first answer of the next period
--   !a      the rate of the scope after refusals: until `spread`, grants are spread, at a part of the published rate:
--           the next one may go at `next`. The rate was cut at the time `cut`, and has grown since `from`: fast at
--           first, slowly around `peak` (a rate times PARTS), and faster beyond. `peak` is a little less than the
--           refused rate. Before the first cut there is no `peak`, and `cut` is when grants began to be spread. `last`
--           is the time of the newest of the `refusals` since `since`, and `wait` the pause after it.
--           Sources: additive increase, multiplicative decrease (Chiu, Jain: "Analysis of the Increase and
--           Decrease Algorithms", 1989); the increase is that of CUBIC (Ha, Rhee, Xu, 2008; RFC 9438)
--
-- Grants are spread over the scope's windows of the shortest period, and the rate is a part of theirs.

local function new_upstream()
  local PAUSE, LEFT, ADAPTED = '!p', '!r', '!a'
  local PARTS = 1e12
  local KEEP, DIP = 15 / 16, 1 / 15 -- peak / refused rate; how far below the peak, as a part of it, the rate begins
  local GROWTH = 1e-4 -- of the rate, times the cube of the time, which is counted in ten_calls
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

  -- shortest returns the shortest period of the scope's windows, the first window that has it, and the
  -- time of ten calls; nil if no window has a period.
  local function shortest(scope)
    local least, first
    for _, i in ipairs(scope.spec.windows) do
      local period = scope.states[i].stated
      if period and (not least or period < least) then least, first = period, i end
    end
    if not least then return nil end
    return least, first, min(max(10 * scope.states[first].every, SECOND), MINUTE)
  end

  -- rate_at returns the rate at a time, as a part of the published one.
  local function rate_at(adapted, now, ten_calls)
    if not adapted.peak then return 1 end
    local peak = adapted.peak / PARTS
    local t = max(0, now - adapted.from) / ten_calls - (peak * DIP / GROWTH) ^ (1 / 3)
    return max(FLOOR, min(1, peak + GROWTH * t * t * t))
  end

  -- adapt notes that the upstream refused a call granted at `at`, and asked for a pause of `wait`, or did not say how
  -- long: then `guess` is the longest pause, else 0. It returns the length of the pause, nil if the scope has no rate,
  -- and whether the rate was cut or grants begin to be spread. A call granted before the last refusal adds no
  -- refusal: for it the length is `wait`, or 0 for a guess.
  local function adapt(scope, now, at, wait, guess)
    local period, _, ten_calls = shortest(scope)
    if not period then return nil end
    local known, span = state_of(scope, ADAPTED, now), min(period, MINUTE)
    local ended = known and known.last + known.wait -- the pause after the last refusal
    if at == 0 then at = known and now < ended and known.last or now end -- the time of the grant is not known
    if known and at <= known.last then return guess > 0 and 0 or wait, false end
    if guess > 0 then
      wait = min(span / 8, SECOND)
      if known and now < ended + span / 2 then wait = min(2 * known.wait, span) end
      wait = min(ceil(wait), guess)
    end
    local a, changes = known or {cut = now, since = now, refusals = 0, next = 0}, not known
    if known and at > a.cut + span / 2 then
      a.peak, a.cut, a.from = floor(rate_at(a, now, ten_calls) * KEEP * PARTS), now, now + wait
      changes = true
    end
    a.last, a.wait, a.refusals = now, wait, a.refusals + 1
    a.next, a.spread = max(a.next, now + wait), ceil(now + wait + SPREAD * ten_calls)
    set_section(scope, ADAPTED, a.spread, a)
    return wait, changes
  end

  -- spread_at returns when a window may grant after `ahead` units while grants are spread; nil if it spreads none.
  local function spread_at(scope, st, now, adapted, ahead)
    local period, _, ten_calls = shortest(scope)
    if not st.stated or st.stated ~= period then return nil end
    local time = adapted.next
    if ahead > 0 then time = max(time, now) + ceil(ahead * st.every / rate_at(adapted, now, ten_calls)) end
    return min(time, adapted.spread)
  end

  -- charge_spread notes when the next grant may go after one with these costs.
  local function charge_spread(scope, adapted, costs, now)
    local period, _, ten_calls = shortest(scope)
    if not period then return end -- the policy has no rate any more
    local spacing = 0
    for _, i in ipairs(scope.spec.windows) do
      if scope.states[i].stated == period then spacing = max(spacing, costs[i] * scope.states[i].every) end
    end
    if spacing == 0 then return end
    -- A request that comes late may catch up by LATE. Where the rate is cut, by less, such as 1 ms at a spacing
    -- of 100 ms, as the upstream may want calls to be apart.
    local rate = rate_at(adapted, now, ten_calls)
    spacing = spacing / rate
    local late = rate < 1 and min(LATE, 1e8 / spacing) or LATE
    adapted.next = ceil(max(adapted.next, now - late) + spacing)
  end

  -- fits_at returns when the upstream accepts `cost` units of a window after `ahead` others, at `from` or later.
  local function fits_at(scope, i, now, from, cost, ahead)
    local paused = state_of(scope, PAUSE, now)
    if paused then from = max(from, paused.ends) end
    if cost == 0 then return from end
    local adapted, rest = state_of(scope, ADAPTED, now), state_of(scope, LEFT .. scope.call.windows[i].unit, now)
    if adapted then from = max(from, spread_at(scope, scope.states[i], now, adapted, ahead) or from) end
    if rest and from < rest.resets and rest.left < ahead + cost then from = rest.resets end
    return from
  end

  -- charge notes a grant, with its costs by window.
  local function charge(scope, costs, now)
    local adapted, units = state_of(scope, ADAPTED, now), {}
    if adapted then charge_spread(scope, adapted, costs, now) end
    for _, i in ipairs(scope.spec.windows) do
      if costs[i] > 0 then units[scope.call.windows[i].unit] = costs[i] end
    end
    for unit, cost in pairs(units) do
      local rest = state_of(scope, LEFT .. unit, now)
      if rest then
        rest.left, rest.grants = rest.left - cost, rest.grants .. format('%d/%d,', now, cost)
        while #rest.grants > GRANTS do rest.grants = sub(rest.grants, find(rest.grants, ',', 1, true) + 1) end
      end
    end
  end

  -- correct notes that the costs, by window, of the grant at `at` have changed, unless an answer has counted it since.
  local function correct(scope, costs, changes, now, at)
    local done = {}
    for _, i in ipairs(scope.spec.windows) do
      local unit, cost, found = scope.call.windows[i].unit, costs[i] + changes[i], 0
      local rest = changes[i] ~= 0 and not done[unit] and state_of(scope, LEFT .. unit, now)
      if rest then
        rest.grants, found = string.gsub(rest.grants, format('%d/%d,', at, costs[i]), format('%d/%d,', at, cost), 1)
        rest.left, done[unit] = rest.left - found * changes[i], found > 0
      end
    end
  end

  -- pause notes a refusal; the scope adapts if the policy does. It returns whether that is news: the rate was cut,
  -- grants begin to be spread, or a pause began. A guessed pause of a scope that adapts is no news.
  local function pause(scope, now, r)
    local refused, length, changes = r.refused, nil, nil
    local wait, guess, paused = refused.wait, refused.guess or 0, state_of(scope, PAUSE, now)
    if refused.adapt then
      length, changes = adapt(scope, now, r.at, wait, guess)
      if length == 0 then return false end
      wait = length or wait
    end
    -- Exempt tenants call during a pause, and may be refused. The longest pause counts.
    if not paused or paused.ends < now + wait then
      set_section(scope, PAUSE, now + wait, {
        ends = now + wait, reported = now, tenant = refused.tenant, cause = refused.cause, reporter = refused.reporter,
      })
    end
    if length and guess > 0 then return changes end
    return not paused or changes or false
  end

  -- add_to_answer adds to an answer what it has not from other scopes: the longest pause; the lowest adapted rate, with
  -- its window, in millionths of the published rate; and the fewest units left.
  local function add_to_answer(scope, now, answer)
    local paused, adapted = state_of(scope, PAUSE, now), state_of(scope, ADAPTED, now)
    if paused and (not answer.pause or paused.ends > answer.pause.ends) then answer.pause = paused end
    for _, w in ipairs(scope.spec.windows) do
      local rest = state_of(scope, LEFT .. scope.call.windows[w].unit, now)
      if rest and rest.resets > now and (not answer.left or rest.left < answer.left.units) then
        answer.left = {unit = scope.call.windows[w].unit, units = max(0, rest.left), reset = rest.resets}
      end
    end
    local period, first, ten_calls = shortest(scope)
    local rate = adapted and period and floor(rate_at(adapted, now, ten_calls) * 1e6)
    if rate and (not answer.adapted or rate < answer.adapted.rate) then
      answer.adapted = {
        since = adapted.since, refusals = adapted.refusals, cut = adapted.cut, spread = adapted.spread,
        rate = rate, window = first,
      }
    end
  end

  -- unanswered returns the grants from `at` on, less the cost of the answered call, and the sum of their units.
  local function unanswered(grants, at, cost)
    local left, sum = {}, 0
    for time, units in gmatch(grants, '(%d+)/(%d+),') do
      time, units = time + 0, units + 0
      if time == at then
        local answered = min(units, cost)
        units = units - answered
        cost = cost - answered
      end
      if time >= at and units > 0 then
        left[#left + 1] = format('%d/%d,', time, units)
        sum = sum + units
      end
    end
    return concat(left), sum
  end

  -- remaining notes the units that the upstream has left, by the answer to a call granted at r.at. It ignores an
  -- answer to a call before the one answered last. Of answers to calls of the same time, the least counts. For the
  -- first answer the log of a window, if it has one, shows which calls are under way.
  local function remaining(scope, now, r)
    local left, at, cost, log, most = r.left, r.at > 0 and r.at or now, 0, '', 0
    for _, i in ipairs(scope.spec.windows) do
      local window = scope.call.windows[i]
      if window.unit == left.unit then
        cost = r.costs[i]
        local grants = window.algorithm.grants and window.algorithm.grants(scope.states[i], at) or ''
        local _, units = unanswered(grants, at, 0)
        if units > most then log, most = grants, units end
      end
    end
    local known, resets = state_of(scope, LEFT .. left.unit, now), now + left.reset
    if known and at < known.at then return end
    local grants, sum = unanswered(known and known.grants or log, at, cost)
    set_section(scope, LEFT .. left.unit, resets + left.reset, {
      left = min(left.units - sum, known and at == known.at and now < known.resets and known.left or MOST),
      at = at, resets = resets, grants = grants,
    })
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
