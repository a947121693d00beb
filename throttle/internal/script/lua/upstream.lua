-- upstream.lua: what the upstream said of a scope, in sections of its value beside the windows'.
--
--   !       a pause (kind "p"): until(7) ramp(7) gone(7) set(7) by
--           Nothing is granted before `until`. From then on `ramp` is the time in which one
--           window's worth is let out, evenly, and `gone` how much of that was granted since, in
--           parts of SHARE. It was set for what was granted at the time `set` or before. `by` is
--           "TENANT:CAUSE:NAME:HAND:AT": whose refusal, what was said, who reported it, and when (us).
--   !UNIT   what the upstream has left (kind "r"): left(7) at(7) entry*; entry time(7) units(7)
--           So many units are left, by the answer to a call that was granted at the time `at`; the
--           entries are what was granted later. It expires when the upstream resets.
--   !a      what the scope lets out after refusals (kind "a"): rate(7) peak(7) cut(7) from(7)
--           next(7) free(7) hold(7) last(7) wait(7) since(7) refusals(7)
--           Until `free` grants are spread: the next one is due at `next`. They go at a part of the
--           published rate, in parts of PARTS. It was cut to `rate` at `cut`, and grows again since
--           `from`: fast at first, slowly around `peak`, where it was refused, and faster beyond.
--           `last` is the newest of the `refusals` since `since`, and `wait` the pause after it. A
--           refusal after `free` doubles `hold`, for which grants are spread. The section is kept
--           for `hold` after `free`.
--           Sources: additive increase, multiplicative decrease (Chiu, Jain: "Analysis of the
--           Increase and Decrease Algorithms", 1989); the increase is that of CUBIC (Ha, Rhee, Xu,
--           2008; RFC 9438).
--
-- Grants are spread, and the rate is meant, by the scope's windows of the shortest period.

local upstream = once(function() -- to most scopes no upstream said anything

  local SHARE = 1e12
  local PARTS = 1e12
  local KEEP = 0.875 -- of the rate, at a cut
  local GROWTH = 1e-4 -- of the rate, in a unit of time, to the third
  local FLOOR = 1 / 64 -- the lowest rate
  local HOLD, HOLDS = 60, 64 -- units of time, and the longest in parts of the shortest
  local SECOND, MINUTE = 1000000, 60000000
  local LATE = 20000 -- us with which late requests catch up
  local GRANTS = 64 -- later grants that are remembered; older ones count as answered

  -- section_of returns a section of that name and kind that has not expired, or false.
  local function section_of(scope, name, kind, now)
    local section = scope.upstream and scope.upstream[name]
    return section and section.kind == kind and section.expires > now and section
  end

  -- put writes a section.
  local function put(scope, name, kind, expires, payload)
    scope.upstream = scope.upstream or {}
    scope.upstream[name] = {kind = kind, expires = expires, payload = payload}
  end

  -- shortest returns the shortest period of the scope's windows, and the first window that has it;
  -- nil if none has one.
  local function shortest(scope)
    local least, first
    for _, i in ipairs(scope.of.windows) do
      local period = scope.states[i].period
      if period and (not least or period < least) then least, first = period, i end
    end
    return least, first
  end

  -- unit_of returns the unit of time: that of ten calls.
  local function unit_of(scope, period, i)
    return min(max(period * 10 / scope.states[i].limit, SECOND), MINUTE)
  end

  -- rate_at returns the part of the published rate.
  local function rate_at(payload, now, unit)
    local rate, peak = unpack7(payload, 1) / PARTS, unpack7(payload, 8) / PARTS
    local t = max(0, now - unpack7(payload, 22)) / unit - ((peak - rate) / GROWTH) ^ (1 / 3)
    return max(FLOOR, min(1, peak + GROWTH * t * t * t))
  end

  -- spread returns the section by which grants are spread now, or nil.
  local function spread(scope, now)
    local section = section_of(scope, '!a', 'a', now)
    return section and unpack7(section.payload, 36) > now and section
  end

  -- adapt notes that what was granted at `at` was refused: for `wait`, or for an unknown time if
  -- `guess`, the longest pause, is above 0. `full`: the rate changes too. It returns how long to
  -- pause, and whether the rate changes, or grants begin to be spread; nil if the scope has nothing
  -- to adapt. Refusals of what was granted before the last one was known are one with it.
  local function adapt(scope, now, at, wait, guess, full)
    local period, i = shortest(scope)
    if not period then return nil end
    local known = section_of(scope, '!a', 'a', now)
    local before = known and known.payload
    local last = before and unpack7(before, 50)
    if at == 0 then at = before and now < last + unpack7(before, 57) and last or now end -- unknown
    if before and at <= last then return guess > 0 and 0 or wait, false end
    local span, unit = min(period, MINUTE), unit_of(scope, period, i)
    if guess > 0 then
      wait = min(span / 8, SECOND)
      if before and now < last + unpack7(before, 57) + span / 2 then
        wait = min(2 * unpack7(before, 57), span)
      end
      wait = min(ceil(wait), guess)
    end
    local hold, rate, peak, cut, from = HOLD * unit, 1, 1, now, now
    local next_at, since, refusals, changes = 0, now, 0, true
    if before then
      next_at, since, refusals = unpack7(before, 29), unpack7(before, 64), unpack7(before, 71)
      if unpack7(before, 36) <= now then
        hold = min(2 * unpack7(before, 43), HOLDS * hold)
      else
        changes, hold = false, unpack7(before, 43)
        rate, peak = unpack7(before, 1) / PARTS, unpack7(before, 8) / PARTS
        cut, from = unpack7(before, 15), unpack7(before, 22)
        if full and at > cut + span / 2 then
          local r = rate_at(before, now, unit)
          rate = max(FLOOR, r * KEEP)
          peak, cut, from = max(rate, r * (1 + KEEP) / 2), now, now + wait
          changes = true
        end
      end
    end
    hold = ceil(hold)
    local free = now + wait + hold
    local payload = pack7(floor(rate * PARTS)) .. pack7(floor(peak * PARTS)) .. pack7(cut)
      .. pack7(from) .. pack7(max(next_at, now + wait)) .. pack7(free) .. pack7(hold) .. pack7(now)
      .. pack7(wait) .. pack7(since) .. pack7(refusals + 1)
    put(scope, '!a', 'a', free + hold, payload)
    return wait, changes
  end

  -- spread_at tells when the next grant of the window is due while grants are spread, behind
  -- `ahead` units; nil if the window does not adapt.
  local function spread_at(scope, st, now, payload, ahead)
    if not st.period then return nil end
    local period, i = shortest(scope)
    if st.period ~= period then return nil end
    local time = unpack7(payload, 29)
    if ahead > 0 then
      local rate = rate_at(payload, now, unit_of(scope, period, i))
      time = max(time, now) + ceil(ahead / st.limit * period / rate)
    end
    return min(time, unpack7(payload, 36))
  end

  -- take_spread notes when the next grant is due after one of these costs.
  local function take_spread(scope, section, costs, now)
    local period, first = shortest(scope)
    local part = 0
    for _, i in ipairs(scope.of.windows) do
      if scope.states[i].period == period then part = max(part, costs[i] / scope.states[i].limit) end
    end
    if part == 0 then return end
    -- A late request may catch up with some of it, but with little where the rate is cut: there every
    -- call may have to be apart.
    local payload = section.payload
    local rate = rate_at(payload, now, unit_of(scope, period, first))
    local spacing = part * period / rate
    local late = rate < 1 and min(LATE, 1e8 / spacing) or LATE
    local next_at = max(unpack7(payload, 29), now - late) + spacing
    payload = sub(payload, 1, 28) .. pack7(ceil(next_at)) .. sub(payload, 36)
    put(scope, '!a', 'a', section.expires, payload)
  end

  -- fits_at tells when the upstream lets so many units through, not before `from`.
  local function fits_at(scope, window, st, now, from, cost, ahead)
    local paused = section_of(scope, '!', 'p', now)
    if paused then
      local gone = min(1, unpack7(paused.payload, 15) / SHARE + ahead / st.limit)
      from = max(from, ceil(unpack7(paused.payload, 1) + unpack7(paused.payload, 8) * gone))
    end
    local adapted = cost > 0 and spread(scope, now)
    if adapted then
      from = max(from, spread_at(scope, st, now, adapted.payload, ahead) or from)
    end
    local rest = section_of(scope, '!' .. window.unit, 'r', now)
    if rest and cost > 0 and from < rest.expires and unpack7(rest.payload, 1) < ahead + cost then
      from = rest.expires
    end
    return from
  end

  -- take notes a grant: costs by window.
  local function take(scope, costs, now)
    local part, units = 0, {}
    for _, i in ipairs(scope.of.windows) do
      if costs[i] > 0 then
        part = max(part, costs[i] / scope.states[i].limit)
        units[scope.call.windows[i].unit] = costs[i]
      end
    end
    local paused = section_of(scope, '!', 'p', now)
    if paused then
      local gone = min(SHARE, unpack7(paused.payload, 15) + floor(part * SHARE))
      local payload = sub(paused.payload, 1, 14) .. pack7(gone) .. sub(paused.payload, 22)
      put(scope, '!', 'p', paused.expires, payload)
    end
    local adapted = part > 0 and spread(scope, now)
    if adapted then take_spread(scope, adapted, costs, now) end
    for unit, cost in pairs(units) do
      local rest = section_of(scope, '!' .. unit, 'r', now)
      if rest then
        local entries = sub(rest.payload, 15) .. pack7(now) .. pack7(cost)
        local left = max(0, unpack7(rest.payload, 1) - cost)
        local payload = pack7(left) .. sub(rest.payload, 8, 14) .. sub(entries, -14 * GRANTS)
        put(scope, '!' .. unit, 'r', rest.expires, payload)
      end
    end
  end

  -- pause notes that the upstream refused what was granted at `at`. Mode 0: refusals of what was
  -- granted before the first one was known are one. The next one, of what was let out since,
  -- doubles the ramp. In other modes the scope adapts: 1 by spreading, 2 also by the rate. `guess`:
  -- see adapt. It returns whether a pause began that the upstream asked for, or the rate changed.
  local function pause(scope, now, at, wait, guess, ramp, ramp_most, mode, by)
    local adapted, changes
    if mode > 0 then
      adapted, changes = adapt(scope, now, at, wait, guess, mode == 2)
      if adapted == 0 then return false end
      if adapted then wait, ramp = adapted, 0 end
    end
    local until_time, set = now + wait, now
    local before = section_of(scope, '!', 'p', now)
    local gone, begins = 0, true
    by = by .. format(':%d', now)
    if before then
      local ends, slope = unpack7(before.payload, 1), unpack7(before.payload, 8)
      begins = ends <= now
      if ends >= until_time then by = sub(before.payload, 29) end -- whose refusal is the longest
      until_time = max(until_time, ends) -- exempt tenants call, and are refused, meanwhile
      if at <= unpack7(before.payload, 22) then
        ramp, set = max(ramp, slope), unpack7(before.payload, 22)
        gone = unpack7(before.payload, 15)
      elseif ramp > 0 then
        ramp = min(max(ramp, 2 * slope), ramp_most)
      end
    end
    local payload = pack7(until_time) .. pack7(ramp) .. pack7(gone) .. pack7(set) .. by
    put(scope, '!', 'p', until_time + 4 * ramp, payload)
    if adapted and guess > 0 then return changes end
    return begins or changes or false
  end

  -- said(list, now) -> "UNTIL OPEN BY" of the longest pause of some scopes, from UNTIL to OPEN a
  -- ramp; then ";" and, of the scope that lets out least, "RATE SINCE REFUSALS WINDOW CHANGED FREE":
  -- millionths of that window's published rate, since when and how often it was refused, when a
  -- refusal changed the rate last, and until when grants are spread. Each is empty if there is none,
  -- and the whole if both are.
  local function said(list, now)
    local last, pause_text, least, adapted_text = now, '', nil, ''
    for i = 1, #list do
      local scope = list[i]
      local paused, adapted = section_of(scope, '!', 'p', now), spread(scope, now)
      if paused then
        local ends, ramp = unpack7(paused.payload, 1), unpack7(paused.payload, 8)
        if ends + ramp > last then
          last = ends + ramp
          pause_text = format('%d %d ', ends, last) .. sub(paused.payload, 29)
        end
      end
      local period, first = shortest(scope)
      if adapted and period then
        local rate = rate_at(adapted.payload, now, unit_of(scope, period, first))
        if not least or rate < least then
          least = rate
          local p = adapted.payload
          adapted_text = format('%d %d %d %d %d %d', rate * 1e6, unpack7(p, 64),
            unpack7(p, 71), first, unpack7(p, 15), unpack7(p, 36))
        end
      end
    end
    if pause_text == '' and adapted_text == '' then return '' end
    return pause_text .. ';' .. adapted_text
  end

  -- remaining notes how many units the upstream has left after a call that was granted at `at`,
  -- until it resets. An answer to an earlier call than the last known says nothing new.
  local function remaining(scope, unit, now, at, units, resets)
    local name = '!' .. unit
    local before, entries = section_of(scope, name, 'r', now), ''
    if before then
      if at < unpack7(before.payload, 8) then return end
      local i = 15
      while i <= #before.payload and unpack7(before.payload, i) <= at do i = i + 14 end
      entries = sub(before.payload, i)
    end
    for i = 1, #entries, 14 do
      units = units - unpack7(entries, i + 7)
    end
    put(scope, name, 'r', resets, pack7(max(0, units)) .. pack7(at) .. entries)
  end

  return {fits_at = fits_at, put = put, take = take, pause = pause, said = said, remaining = remaining}
end)
