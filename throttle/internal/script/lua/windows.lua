-- windows.lua: what ARGV say of the policy, and when costs fit its windows.
--
-- KEYS  1 the count of the policy's line, sluice:{POLICY}:q. Its beginning P is that of all the
--         policy's keys
-- ARGV  1 now: microseconds, or 0 for the clock of Redis
--       2 process: 16 hex digits   3 seq: of this process's call, the same only when it is repeated
--       4 scopes: of each the attributes and ";", narrow to broad: "tenant,user;tenant;"; shared
--         is ";"
--       5 windows: of each 8 values by blanks, and ";":
--         scope (1 to S), name, kind, unit, p1, p2, p3, p4 (see the kind's file)
--       6 lists: those that stand for p4 where that is "@", each with a ";"
--       then what the script's own file says, from ARGV[call.first] on
--
-- A call is a table:
--   P, now, process, seq        as above
--   first                       where the arguments begin that the script's own file names
--   leases                      whether some window holds what is granted
--   only_tenants                whether no attribute but the tenant counts
--   scopes                      list of {number, attributes, of_tenant, windows, heads}
--   windows                     list of {name, kind, unit, algorithm, head, p1 .. p4}
--   open                        the scopes that were opened, by key
--   raw                         values that were read ahead, by key
--   texts                       what was made of costs and of own parameters, by text
--   waiting                     how many tickets were in line when the call began
--   dirty                       see request.lua

local windows
do
local find, gmatch, char, sub = string.find, string.gmatch, string.char, string.sub

-- costs_of("requests=1,tokens=5") -> {text, units = {requests = 1, tokens = 5}, windows = {1, 5}},
-- one table for equal texts.
local function costs_of(call, text)
  local costs = call.texts[text]
  if costs then return costs end
  local units, by_window = {}, {}
  for unit, n in gmatch(text, '([^=,]+)=(%d+)') do units[unit] = n + 0 end
  for i = 1, #call.windows do by_window[i] = units[call.windows[i].unit] or 0 end
  costs = {text = text, units = units, windows = by_window}
  call.texts[text] = costs
  return costs
end

-- fits_window is fits_at of one window, and of what the upstream said of its scope. A pause also
-- holds for what costs nothing here.
local function fits_window(scope, i, now, from, cost, ahead, each)
  local window, st = scope.call.windows[i], scope.states[i]
  local time = from
  if cost > 0 then time = window.algorithm.fits_at(st, now, from, cost, ahead, each) end
  if scope.upstream then time = upstream().fits_at(scope, window, st, now, time, cost, ahead) end
  return time
end

windows = {
  -- limits returns what of the policy says which costs fit. Calls by another policy differ in it.
  limits = function() return ARGV[4] .. ARGV[5] end,

  -- The scope that all share. A line waits for handler slots there, also if it has no window.
  ROOT = 'w:',

  costs_of = costs_of,
  fits_window = fits_window,

  -- read_policy makes the call of KEYS and ARGV.
  read_policy = function()
    local argv = ARGV
    local now = argv[1] + 0
    if now == 0 then
      local t = redis.call('TIME')
      now = t[1] * 1000000 + t[2]
    end
    local scopes, list, nscopes, nwindows = {}, {}, 0, 0
    local leases, only_tenants, lists, nlists = false, true, {}, 0
    for attributes in gmatch(argv[4], '([^;]*);') do
      local of_tenant = attributes == 'tenant'
      if not of_tenant and attributes ~= '' then
        only_tenants = false
        of_tenant = find(',' .. attributes .. ',', ',tenant,', 1, true) and true or false
      end
      nscopes = nscopes + 1
      scopes[nscopes] = {
        number = nscopes, attributes = attributes, of_tenant = of_tenant, windows = {}, heads = {},
      }
    end
    for place, name, kind, unit, p1, p2, p3, p4 in gmatch(argv[5], '(%d+) (%S+) (%S) (%S+) (%d+) (%d+) (%d+) (%S+);') do
      local scope, algorithm, head = scopes[place + 0], algorithms[kind], char(#name) .. name .. kind
      if algorithm.release then leases = true end
      if p4 == '@' then
        if nlists == 0 then
          for text in gmatch(argv[6], '([^;]*);') do lists[#lists + 1] = text end
        end
        nlists = nlists + 1
        p4 = lists[nlists]
      else
        p4 = p4 + 0
      end
      nwindows = nwindows + 1
      list[nwindows] = {
        name = name, kind = kind, unit = unit, algorithm = algorithm, head = head,
        p1 = p1 + 0, p2 = p2 + 0, p3 = p3 + 0, p4 = p4,
      }
      scope.windows[#scope.windows + 1] = nwindows
      scope.heads[head] = nwindows
    end
    return {
      P = sub(KEYS[1], 1, -2), now = now, process = argv[2], seq = argv[3] + 0, first = 7,
      leases = leases, only_tenants = only_tenants, scopes = scopes, windows = list,
      open = {}, raw = {}, texts = {}, waiting = 0,
      dirty = false,
    }
  end,

  -- lease_bytes returns a reservation's id as a lease keeps it: 8 bytes of 16 hex digits.
  lease_bytes = function(id)
    return (string.gsub(id, '..', function(hex) return char(tonumber(hex, 16)) end))
  end,

  -- own_parameters returns a tenant's own parameters, {burst = {5, 3000000, 0}}, one table for
  -- equal texts, or nil. The text is "1 5 3000000 0;..." by the window's place, or "@burst 5
  -- 3000000 0;..." by its name, as a line keeps it.
  own_parameters = function(call, text)
    if text == '' then return nil end
    local own = call.texts[text]
    if own then return own end
    own = {}
    for name, a, b, c in gmatch(text, '(%S+) (%S+) (%S+) (%S+);') do
      local window = call.windows[tonumber(name)]
      own[window and window.name or sub(name, 2)] = {a + 0, b + 0, c + 0}
    end
    call.texts[text] = own
    return own
  end,

  -- align brings scopes to one time, and returns it: that of Redis, or that of their newest change
  -- if the clock was set back.
  align = function(call, list)
    local now, behind = call.now, false
    for s = 1, #list do
      local at = list[s].now
      if at ~= now then
        behind = true
        if at > now then now = at end
      end
    end
    if behind then
      for s = 1, #list do
        if list[s].now < now then scopes.reload(list[s], now) end
      end
    end
    return now
  end,

  -- fits_at returns the earliest time at which the costs fit all windows of the scopes together.
  -- `fits`, if given, gets by window when they would fit it alone, 0 for at once. A later time can
  -- be worse for a window that closes at times, hence the repetition. It is bounded: windows that
  -- are almost never open together get a time to look again.
  fits_at = function(call, list, costs, now, fits)
    local time = now
    for s = 1, #list do
      local scope, of = list[s], list[s].of.windows
      for j = 1, #of do
        local i = of[j]
        local t = fits_window(scope, i, now, now, costs[i], 0, 1)
        if fits then fits[i] = t > now and t or 0 end
        if t > time then time = t end
      end
    end
    local from = now
    for _ = 1, 100 do
      if time == from then break end
      from = time
      for s = 1, #list do
        local of = list[s].of.windows
        for j = 1, #of do
          local t = fits_window(list[s], of[j], now, from, costs[of[j]], 0, 1)
          if t > time then time = t end
        end
      end
    end
    return time
  end,

  -- take takes the costs in all scopes, at `now`.
  take = function(call, list, costs, now, hold, id)
    for s = 1, #list do
      local scope = list[s]
      local of, states = scope.of.windows, scope.states
      if now > scope.now then scopes.reload(scope, now) end
      scope.changed = true
      for j = 1, #of do
        local i = of[j]
        if costs[i] > 0 then call.windows[i].algorithm.take(states[i], now, costs[i], hold, id) end
      end
      if scope.upstream then upstream().take(scope, costs, now) end
    end
  end,

  -- give_back gives back what was taken at `at`.
  give_back = function(call, list, costs, now, at, id)
    for s = 1, #list do
      local scope, of = list[s], list[s].of.windows
      scopes.touch(scope, now)
      for j = 1, #of do
        local i = of[j]
        local algorithm = call.windows[i].algorithm
        -- What was granted later than now, before a clock was set back, is in no state any more.
        -- What a lease holds is not what was settled since.
        if at <= now and (costs[i] > 0 or algorithm.release) then
          algorithm.give_back(scope.states[i], now, at, costs[i], id)
        end
      end
    end
  end,
}
end
