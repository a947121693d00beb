-- cancel.lua: gives back what a reservation took and what still counts, once.
--
-- KEYS  one value per scope, then the nonce of the reservation, then the count of the line
-- ARGV  1 now: microseconds, or 0 for the clock of Redis
--       2 at: when the reservation was granted (us)
--       3 nonce_ttl: milliseconds for which a repeated call is recognised, at the least
--       4 line: as in reserve.lua
--       5.. nine values a window (windows.lua)
-- reply status: 0 cancelled before, 1 cancelled
--       at:     when this was decided (us)
--       time:   the same
--       then for every window: used (units), given back (units), resets (us)
--       and if there is a line: when somebody must look again (us, 0 never), then the tickets called

local WINDOWS = 5
local CANCELLED = 'cancelled'

local values = redis.call('MGET', unpack(KEYS))
local real = clock(ARGV[1])
local windows, scopes, now = open_windows(values, #KEYS - 2, real, WINDOWS)
if not windows then return scopes end

local at, nonce = tonumber(ARGV[2]), values[#KEYS - 1]
-- The same nonce may have been granted anew since: that is another reservation.
local granted = tonumber(nonce or '') or at
local status = (nonce == CANCELLED or granted ~= at) and 0 or 1
local counts_until = now
-- What was granted later than now, before a clock was set back, is in no state any more.
local counts = status == 1 and at <= now
for _, w in ipairs(windows) do
  w.fits = 0
  if counts and w.cost > 0 then
    counts_until = max(counts_until, w.algorithm.resets_at(w, w.state, now))
    w.fits = w.algorithm.give_back(w, w.state, now, at, w.cost)
  end
end
if status == 1 then
  save(windows, scopes, now, real)
  -- Remembered for as long as anything of the reservation would still be counted.
  local ttl = max(ceil((counts_until - real) / 1000), tonumber(ARGV[3]))
  redis.call('SET', KEYS[#KEYS - 1], CANCELLED, 'PX', string.format('%.0f', ttl))
end
if not values[#KEYS] or status == 0 then return reply(status, now, now, windows, now) end
