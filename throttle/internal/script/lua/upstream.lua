-- upstream.lua: what the upstream said of a scope, in sections of its value beside the windows'.
--
--   !       a pause (kind "p"): until(7) ramp(7) gone(7) set(7) by
--           Nothing is granted before `until`. From then on `ramp` is the time in which one
--           window's worth is let out, evenly, and `gone` how much of that was granted since, in
--           parts of SHARE. It was set for what was granted at the time `set` or before, to the
--           tenant `by` (escaped; "-" is none).
--   !UNIT   what the upstream has left (kind "r"): left(7) at(7) entry*; entry time(7) units(7)
--           So many units are left, by the answer to a call that was granted at the time `at`; the
--           entries are what was granted later. It expires when the upstream resets.

local upstream -- made when it is first asked for: to most scopes no upstream said anything
do

local made
function upstream()
  if made then return made end

  local SHARE = 1e12
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

  -- fits_at tells when the upstream lets so many units through, not before `from`.
  local function fits_at(scope, window, st, now, from, cost, ahead)
    local paused = section_of(scope, '!', 'p', now)
    if paused then
      local gone = min(1, unpack7(paused.payload, 15) / SHARE + ahead / window.algorithm.capacity(st))
      from = max(from, ceil(unpack7(paused.payload, 1) + unpack7(paused.payload, 8) * gone))
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
        local window = scope.call.windows[i]
        part = max(part, costs[i] / window.algorithm.capacity(scope.states[i]))
        units[window.unit] = costs[i]
      end
    end
    local paused = section_of(scope, '!', 'p', now)
    if paused then
      local gone = min(SHARE, unpack7(paused.payload, 15) + floor(part * SHARE))
      local payload = sub(paused.payload, 1, 14) .. pack7(gone) .. sub(paused.payload, 22)
      put(scope, '!', 'p', paused.expires, payload)
    end
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

  -- pause notes that the upstream refused what was granted at `at`. Refusals of what was granted
  -- before the first one was known are one. The next one, of what was let out since, doubles the
  -- ramp. It returns whether a pause began.
  local function pause(scope, now, at, wait, ramp, ramp_most, by)
    local until_time, set = now + wait, now
    local before = section_of(scope, '!', 'p', now)
    local gone, begins = 0, true
    if before then
      local ends, slope = unpack7(before.payload, 1), unpack7(before.payload, 8)
      begins = ends <= now
      if ends >= until_time then by = sub(before.payload, 29) end -- whose refusal is the longest
      until_time = max(until_time, ends) -- exempt tenants call, and are refused, meanwhile
      if at <= unpack7(before.payload, 22) then
        ramp, set = max(ramp, slope), unpack7(before.payload, 22)
        gone = unpack7(before.payload, 15)
      else
        ramp = min(max(ramp, 2 * slope), ramp_most)
      end
    end
    local payload = pack7(until_time) .. pack7(ramp) .. pack7(gone) .. pack7(set) .. by
    put(scope, '!', 'p', until_time + 4 * ramp, payload)
    return begins
  end

  -- paused(list, now) -> "UNTIL OPEN BY" of the longest pause of some scopes, from UNTIL to OPEN a
  -- ramp; empty if there is none.
  local function paused(list, now)
    local last, text = now, ''
    for i = 1, #list do
      local section = section_of(list[i], '!', 'p', now)
      if section then
        local ends, ramp = unpack7(section.payload, 1), unpack7(section.payload, 8)
        if ends + ramp > last then
          last = ends + ramp
          text = format('%d %d ', ends, last) .. sub(section.payload, 29)
        end
      end
    end
    return text
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

  made = {
    fits_at = fits_at, put = put, take = take, pause = pause, paused = paused, remaining = remaining,
  }
  return made
end
end
