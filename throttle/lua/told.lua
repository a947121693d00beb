-- told.lua: what the far side said of a scope, in sections of its value beside those of the windows.
--
--   !       a pause (kind "p"): until(7) ramp(7) gone(7) set(7)
--           Nothing is granted before `until`. From then on `ramp` is the time in which one window's
--           worth is let out, evenly, and `gone` how much of that was granted since, in parts of
--           SHARE. It was set for something granted at the time `set` or before.
--   !UNIT   calls left at the far side (kind "r"): left(7) at(7) entry*; entry time(7) units(5)
--           So many units are left, by the answer to a call that was granted at the time `at`; the
--           entries are what was granted later. It expires when the far side resets.

local SHARE = 1e12
local GRANTS = 64 -- how many later grants are remembered at the most; older ones count as answered

local function told_section(scope, name, kind, now)
  local at = scope.told and scope.at[name]
  local section = at and scope.sections[at]
  return section and section.kind == kind and section.expires > now and section
end

-- Who was called has its part of the ramp, and what others took of it by other units does not matter.
local function told_fits_at(w, now, from, cost, ahead, called)
  local pause = told_section(w.scope, '!', 'p', now)
  if pause then
    local gone = called and 0 or min(1, unpack7(pause.payload, 15) / SHARE + ahead / w.algorithm.capacity(w))
    from = max(from, ceil(unpack7(pause.payload, 1) + unpack7(pause.payload, 8) * gone))
  end
  local left = told_section(w.scope, '!' .. w.unit, 'r', now)
  if left and cost > 0 and from < left.expires and unpack7(left.payload, 1) < ahead + cost then from = left.expires end
  return from
end

-- told_take notes a grant.
local function told_take(scope, windows, now)
  local part, costs = 0, {}
  for _, w in ipairs(windows) do
    if w.scope == scope and w.cost > 0 then
      part = max(part, w.cost / w.algorithm.capacity(w))
      costs[w.unit] = w.cost
    end
  end
  local pause = told_section(scope, '!', 'p', now)
  if pause then
    local gone = min(SHARE, unpack7(pause.payload, 15) + floor(part * SHARE))
    put_section(scope, '!', 'p', pause.expires, sub(pause.payload, 1, 14) .. pack7(gone) .. sub(pause.payload, 22))
  end
  for unit, cost in pairs(costs) do
    local left = told_section(scope, '!' .. unit, 'r', now)
    if left then
      local entries = sub(left.payload, 15) .. pack7(now) .. pack5(cost)
      put_section(scope, '!' .. unit, 'r', left.expires,
        pack7(max(0, unpack7(left.payload, 1) - cost)) .. sub(left.payload, 8, 14) .. sub(entries, -12 * GRANTS))
    end
  end
end

-- told_pause notes that the far side refused what was granted at `at`. Refusals of what was granted
-- before it was known are one; the next one, of what was let out since, doubles the ramp.
local function told_pause(scope, now, at, wait, ramp, ramp_most)
  local until_time, set = now + wait, now
  local before = told_section(scope, '!', 'p', now)
  local gone = 0
  if before then
    local ends, slope = unpack7(before.payload, 1), unpack7(before.payload, 8)
    until_time = max(until_time, ends) -- exempt tenants call, and are refused, meanwhile
    if at <= unpack7(before.payload, 22) then
      ramp, set = max(ramp, slope), unpack7(before.payload, 22)
      gone = unpack7(before.payload, 15)
    else
      ramp = min(max(ramp, 2 * slope), ramp_most)
    end
  end
  put_section(scope, '!', 'p', until_time + 4 * ramp, pack7(until_time) .. pack7(ramp) .. pack7(gone) .. pack7(set))
  scope.told = true
end

local function told_resume(scope) put_section(scope, '!', 'p', 0, '') end

-- told_left notes how many units the far side has left after a call that was granted at `at`, until
-- it resets. An answer to an earlier call than the last known says nothing new.
local function told_left(scope, unit, now, at, units, resets)
  local name = '!' .. unit
  local before, entries = told_section(scope, name, 'r', now), ''
  if before then
    if at < unpack7(before.payload, 8) then return end
    local i = 15
    while i <= #before.payload and unpack7(before.payload, i) <= at do i = i + 12 end
    entries = sub(before.payload, i)
  end
  for i = 1, #entries, 12 do
    units = units - unpack5(entries, i + 7)
  end
  put_section(scope, name, 'r', resets, pack7(max(0, units)) .. pack7(at) .. entries)
  scope.told = true
end
