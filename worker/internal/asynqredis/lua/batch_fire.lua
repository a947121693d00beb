-- batch_fire.lua: decides all ticks of a batch up to a time, once, and records a firing: of one of them, or by hand.
--
-- KEYS  1 the batch (hash): its firings that have not ended  2 all its firings (sorted set)
--       3 the last tick that was decided, by schedule (hash)
-- ARGV  1 the last tick that was decided (s), as the caller knows it  2 the last that is decided now (s),
--       or none to fire by hand  3 how long a firing is kept (s)
--       4 1 to skip the firing while another has not ended  5 its name  6 its tick (s), or none  7 its schedule
-- reply 1 it fires, -1 skipped, 0 none fires, another scheduler was faster, or another schedule has decided later ticks

local now, NONE = tonumber(redis.call('TIME')[1]), '-62135596800' -- the zero time of Go: year 1
local last_known, up_to, kept, name, tick, schedule = ARGV[1], ARGV[2], ARGV[3], ARGV[5], ARGV[6], ARGV[7]
local key, by_hand = KEYS[1] .. ':' .. name, up_to == NONE
if not by_hand then
  if (redis.call('HGET', KEYS[3], schedule) or NONE) ~= last_known then return 0 end
  redis.call('HSET', KEYS[3], schedule, up_to)
  local decided = tick ~= NONE and redis.call('HGETALL', KEYS[3]) or {} -- two per schedule: its text, its last tick
  for i = 2, #decided, 2 do
    local last = tonumber(decided[i])
    if last > tonumber(up_to) and last <= now then return 0 end -- one after now does not count: a clock was wrong
  end
end
for _, old in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - kept)) do
  if redis.call('EXISTS', KEYS[1] .. ':' .. old) == 0 then redis.call('ZREM', KEYS[2], old) end
end
if tick == NONE then return 0 end
if redis.call('EXISTS', key) == 0 then -- else it has fired: by hand, by another schedule, or by a copy of this call
  if ARGV[4] == '1' and redis.call('HLEN', KEYS[1]) > 0 then return -1 end
  redis.call('HSET', key, 'phase', 'new', 'begun', now)
  redis.call('EXPIRE', key, kept)
  redis.call('HSET', KEYS[1], name, 'open')
  redis.call('ZADD', KEYS[2], tick, name)
end
return 1
