-- batch_fire.lua: decides all ticks of a batch up to a time, once, and records the firing of one of them.
--
-- KEYS  1 the batch (hash): its firings that have not ended  2 all its firings (sorted set)
--       3 the last tick that was decided, by schedule (hash)
-- ARGV  1 the last tick that was decided (s), as the caller knows it  2 the last that is decided now (s),
--       or none to fire by hand  3 how long a firing is kept (s)
--       4 1 to skip the firing while another has not ended  5 its name  6 its tick (s), or none  7 its schedule
-- reply 1 it fires, -1 skipped, 0 none fires, another scheduler was faster, or another schedule has decided later ticks

local time, none = redis.call('TIME'), '-62135596800' -- year 1
local key = KEYS[1] .. ':' .. ARGV[5]
if ARGV[2] ~= none then
  if (redis.call('HGET', KEYS[3], ARGV[7]) or none) ~= ARGV[1] then return 0 end
  redis.call('HSET', KEYS[3], ARGV[7], ARGV[2])
  for _, last in ipairs(ARGV[6] ~= none and redis.call('HGETALL', KEYS[3]) or {}) do
    if (tonumber(last) or 0) > ARGV[2] + 0 and tonumber(last) <= time[1] + 0 then return 0 end -- else a clock was wrong
  end
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', time[1] - ARGV[3])) do
  if redis.call('EXISTS', KEYS[1] .. ':' .. name) == 0 then redis.call('ZREM', KEYS[2], name) end
end
if ARGV[6] == none then return 0 end
if redis.call('EXISTS', key) == 0 then
  if ARGV[4] == '1' and redis.call('HLEN', KEYS[1]) > 0 then return -1 end
  redis.call('HSET', key, 'phase', 'new', 'begun', time[1])
  redis.call('EXPIRE', key, ARGV[3])
  redis.call('HSET', KEYS[1], ARGV[5], 'open')
  redis.call('ZADD', KEYS[2], ARGV[6], ARGV[5])
end
return 1
