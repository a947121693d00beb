-- reserve.lua: takes the cost in all windows, or in none; and whoever cannot take it waits.
--
-- KEYS  one value per scope, then the nonce of this call, then the count of the line
-- ARGV  1 now: microseconds, or 0 for the clock of Redis
--       2 what: "reserve"; "exempt" (counted, never denied); "peek" (changes nothing); "plan" (takes
--         a place in the line without running); "leave" (gives the place back); "skip" (was
--         called and cannot come for now: keeps its rank, and the next is called); "pump" (calls
--         whoever fits now); "retune" (writes a flow's weight and its tenant's own parameters anew)
--       3 nonce_ttl: milliseconds for which a repeated call is recognised
--       4 line: its fields, each on a line: ticket (empty: does not wait), flow, tenant, weight,
--         costs, front, hold (us), budget (tickets), max_wait (us), backlog (tickets), attributes of
--         all scopes, the tenant's own parameters, the policy's parameters where they differ
--       5 hold: for how long what is granted may be held where it has to be given back (us)
--       6.. nine values a window (windows.lua)
-- reply status: 0 denied, 1 granted, 2 granted before to the same nonce, 3 planned,
--               4 refused (would wait longer than max_wait), 5 refused (backlog is full),
--               6 planned before
--       at:     when this was decided, or when it was granted before (us)
--       time:   the earliest time at which everything fits (us)
--       behind: how far the clock is behind the windows, which stand still until it caught up (us)
--       then for every window: used (units), fits (us, 0 for at once), resets (us)
--       and if there is a line: when somebody must look again (us, 0 never), then the tickets called

local WINDOWS = 6

local values = redis.call('MGET', unpack(KEYS))
local what = ARGV[2]
local granted_before, there_is_a_line = granted_at(values[#KEYS - 1]), values[#KEYS]
local real = clock(ARGV[1])
local windows, scopes, now = open_windows(values, #KEYS - 2, real, WINDOWS)
if not windows then return scopes end

local function take_all()
  for _, w in ipairs(windows) do
    if w.cost > 0 then w.algorithm.take(w, w.state, now, w.cost, tonumber(ARGV[5])) end
    put_window(w, now)
  end
  for _, scope in ipairs(scopes) do
    if scope.told then told_take(scope, windows, now) end
  end
  redis.call('SET', KEYS[#KEYS - 1], string.format('%.0f', now), 'PX', ARGV[3])
end

local time = fits_at(windows, now)
if granted_before and (what == 'reserve' or what == 'exempt') then
  return reply(2, granted_before, granted_before, windows, now)
end
if not there_is_a_line then
  if what == 'leave' or what == 'skip' or what == 'pump' or what == 'retune' then return reply(0, now, now, windows, now) end
  if time > now and what == 'peek' or time > now and what == 'reserve' and byte(ARGV[4], 1) == 10 then -- no ticket
    -- A clock that was set back tells the wait from its own time, behind the windows'.
    return reply(0, real, time, windows, now)
  end
  if what == 'peek' then return reply(1, now, now, windows, now) end
  if what == 'exempt' or what == 'reserve' and time <= now then
    take_all()
    for i, scope in ipairs(scopes) do write_scope(KEYS[i], scope, now, real) end
    return reply(1, now, now, windows, now)
  end
elseif not readable_line(there_is_a_line) then
  return redis.error_reply('SLUICE_STATE key ' .. KEYS[#KEYS] .. ': the line is not of format ' .. LINE_FORMAT)
end
