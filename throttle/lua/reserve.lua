-- reserve.lua: takes the cost in all windows, or in none.
--
-- KEYS  one value per scope, then (unless ARGV[2] is "peek") the nonce of this call
-- ARGV  1 now: microseconds, or 0 for the clock of Redis
--       2 what: "reserve", "exempt" (counted, never denied) or "peek" (changes nothing)
--       3 nonce_ttl: milliseconds for which a repeated call is recognised
--       4.. eight values a window (windows.lua)
-- reply status: 0 denied, 1 granted, 2 granted before to the same nonce
--       at:     when this was decided, or when it was granted before (us)
--       time:   the earliest time at which everything fits (us)
--       then for every window: used (units), fits (us, 0 for at once), resets (us)

local WINDOWS = 4

local values = redis.call('MGET', unpack(KEYS))
local peek, exempt = ARGV[2] == 'peek', ARGV[2] == 'exempt'
local nscopes = peek and #KEYS or #KEYS - 1
local granted_before = not peek and tonumber(values[#KEYS] or '')
local real = clock(ARGV[1])
local windows, scopes, now = open_windows(values, nscopes, real, WINDOWS)
if not windows then return scopes end

local time = fits_at(windows, now)
if granted_before then return reply(2, granted_before, granted_before, windows, now) end
-- A clock that was set back tells the wait from its own time, behind the windows'.
if time > now and not exempt then return reply(0, real, time, windows, now) end
if peek then return reply(1, now, now, windows, now) end

for _, w in ipairs(windows) do
  if w.cost > 0 then w.algorithm.take(w, w.state, now, w.cost) end
end
save(windows, scopes, now, real)
redis.call('SET', KEYS[#KEYS], string.format('%.0f', now), 'PX', ARGV[3])
return reply(1, now, now, windows, now)
