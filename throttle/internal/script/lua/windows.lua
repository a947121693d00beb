-- windows.lua: reads the policy from ARGV, and computes when costs fit its windows.
--
-- KEYS  1 the count of the line, PREFIXsluice:{LINE}:q (keys.go). The line's keys begin with P. Other KEYS are unused
-- ARGV  1 now: microseconds, or 0 for the clock of Redis
--       2 process: 16 hex digits   3 seq: of this process's call, the same only when it is repeated
--       4 the policy, as JSON: Policy.text in script.go
--       5 when operators' pause of the policy ends (us), 0 for none: see decide.lua and line_take.lua
--       6 its windows' lists of ticks, as JSON by their names, instead of p4; empty if there is none
--       then the arguments of the script's own file, from ARGV[7] on
--
-- A call is a table:
--   P, now, paused  as above; paused is nil without a pause that is in force
--   leases          whether some window counts by leases
--   batch_share     Policy.BatchShare
--   scopes          list of {attributes, of_tenant, windows}, narrow to broad
--   windows         list of {name, unit, algorithm, label, p1 .. p4}: see the algorithm's file; label is name and kind
--   scope_of        by window: the number of its scope
--   open, raw       the scopes that were opened, and values that were read ahead, by key
--   generation      how often states of any scope were loaded again (scope.lua)
--   texts           costs and settings that were read, by text
--   line, dirty     of decide.lua: the functions of line_join.lua, if they are set up; whether something has changed
--                   that must not be done twice
--   id_base         of take.lua
--   waiting         the count of the line (line.lua); nil or false if nobody waits

local windows
do
-- costs_of("requests=1,tokens=5") -> {text, windows = {1, 5}, units = {...}}, the same table for equal texts.
local function costs_of(call, text)
  local costs = call.texts[text]
  if costs then return costs end
  local by_window, all, units = {0, 0}, call.windows, {nil}
  for i = 3, #all do by_window[i] = 0 end
  for unit, n in gmatch(text, '([^=,]+)=(%d+)') do
    n = n + 0
    for i = 1, #all do
      if all[i].unit == unit then by_window[i] = n end
    end
    units[unit] = n
  end
  costs = {text = text, units = units, windows = by_window}
  call.texts[text] = costs
  return costs
end

-- fits_window is an algorithm's fits_at that also asks the upstream: its pause delays even requests that cost nothing.
local function fits_window(scope, i, now, cost, ahead, each)
  local call, time = scope.call, now
  if cost > 0 then time = call.windows[i].algorithm.fits_at(scope.states[i], now, cost, ahead, each) end
  if scope.sections then time = made_once(extras, call).upstream().fits_at(scope, i, now, time, cost, ahead) end
  return time
end

windows = {
  costs_of = costs_of,
  fits_window = fits_window,

  -- settings_of returns a tenant's Settings (request.go), the same table for equal texts, or nil.
  settings_of = function(call, text)
    if text == '' then return nil end
    local settings = call.texts[text]
    if settings then return settings end
    settings = cjson.decode(text)
    settings.windows = settings.windows or {}
    call.texts[text] = settings
    return settings
  end,

  -- align brings scopes to the time of Redis, or of their last change if the clock was set back. It returns the time.
  align = function(call, list)
    local now = call.now
    for s = 1, #list do
      if list[s].now > now then now = list[s].now end
    end
    for s = 1, #list do
      if list[s].now < now then scopes.reload(list[s], now) end
    end
    return now
  end,

  -- fits_at returns the earliest time at which the costs fit all windows of the scopes. fits[i] gets the
  -- time at which they fit window i, 0 for at once.
  fits_at = function(list, costs, now, fits)
    local time = now
    for s = 1, #list do
      for _, i in ipairs(list[s].spec.windows) do
        local t = fits_window(list[s], i, now, costs[i], 0, 1)
        fits[i] = t > now and t or 0
        if t > time then time = t end
      end
    end
    return time
  end,

  charge = function(call, list, costs, now, hold, id)
    for s = 1, #list do
      local scope = list[s]
      scope.changed = true
      for _, i in ipairs(scope.spec.windows) do
        if costs[i] > 0 then call.windows[i].algorithm.charge(scope.states[i], now, costs[i], hold, id) end
      end
      if scope.sections then made_once(extras, call).upstream().charge(scope, costs, now) end
    end
  end,
}
end

-- lease_id returns the 8 bytes by which leases know a reservation, from its 16 hex digits; nil without leases.
local function lease_id(call, id)
  if not call.leases then return nil end
  return (string.gsub(id, '..', function(hex) return char(tonumber(hex, 16)) end))
end

local function grant(call, r, list, now)
  windows.charge(call, list, r.costs, now, r.hold, lease_id(call, r.id))
  call.dirty = true
end

-- read_policy returns the call that KEYS and ARGV describe.
local function read_policy()
  local now = ARGV[1] + 0
  if now == 0 then
    local t = redis.call('TIME')
    now = t[1] * 1000000 + t[2]
  end
  local all_scopes, all, scope_of, leases, batch_share = unpack(cjson.decode(ARGV[4]))
  local paused, lists = ARGV[5] + 0, ARGV[6] ~= '' and cjson.decode(ARGV[6]) or {}
  for i = 1, #all do
    local w = all[i]
    all[i] = {
      name = w[1], unit = w[3], algorithm = algorithms[w[2]], label = w[1] .. w[2],
      p1 = w[4], p2 = w[5], p3 = w[6], p4 = lists[w[1]] or w[7],
    }
  end
  return {
    P = sub(KEYS[1], 1, -2), now = now, paused = paused > now and paused or nil, scopes = all_scopes, windows = all,
    scope_of = scope_of, open = {}, raw = {}, texts = {}, generation = 0, dirty = false, leases = leases,
    batch_share = batch_share,
  }
end
