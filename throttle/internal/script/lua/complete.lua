-- complete.lua: what most calls do not need of a call and of windows.
--
-- complete(call) adds it, for lines and for few verbs.

local function complete(call)
  call.complete, call.only_tenants, call.texts, call.numbers = true, true, {}, {}
  for _, of in ipairs(call.scopes) do
    call.numbers[of.attributes] = of.number
    if of.attributes ~= '' and of.attributes ~= 'tenant' then call.only_tenants = false end
  end

  -- The scope that all share. A line waits for handler slots there, even if it has no window.
  windows.ROOT = 'w:'

  -- limits returns the policy's scopes and windows as text. Calls by other limits differ in it.
  function windows.limits() return ARGV[4] .. ARGV[5] end

  -- resumed returns the scopes of a request as they will stand when operators' pause of it ends, and when
  -- that is. Without a pause it returns what it gets.
  function windows.resumed(r, list, at)
    if not r.paused then return list, at end
    local later = {}
    for s = 1, #list do later[s] = scopes.later(list[s], r.paused) end
    return later, r.paused
  end

  -- too_late returns the status by which a request is refused that waits until then; nil if it is not.
  function windows.too_late(r, expected, latest, earliest)
    local now = call.now
    -- If nobody knows, only what may not wait at all is refused.
    local wait = latest > 0 and latest - now or max(min(expected - now, 2), (r.paused or now) - now)
    if r.max_wait and wait > r.max_wait then return 4 end
    if r.deadline and earliest - now > r.deadline then return 7 end
    return nil
  end
end
