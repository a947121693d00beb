-- batch_fire.lua: decides about ticks of a batch, once: records the firings of those that fire.
--
-- KEYS  1 the batch (hash)  2 its firings that have not ended (set)  3 all its firings (sorted set)
-- ARGV  1 the last tick that was decided (s), as the caller knows it ("" for none)
--       2 the last that is decided now (s, or "" to fire by hand)  3 how long a firing is kept (s)
--       then two per firing: its name, its tick (s)
-- reply 1 decided, 0 another scheduler was faster

local time = redis.call('TIME')
if ARGV[2] ~= '' then
  if (redis.call('HGET', KEYS[1], 'last') or '') ~= ARGV[1] then return 0 end
  redis.call('HSET', KEYS[1], 'last', ARGV[2])
end
for i = 4, #ARGV, 2 do
  local key = KEYS[1] .. ':' .. ARGV[i]
  if redis.call('EXISTS', key) == 0 then
    redis.call('HSET', key, 'phase', 'new', 'begun', time[1])
    redis.call('EXPIRE', key, ARGV[3])
    redis.call('SADD', KEYS[2], ARGV[i])
    redis.call('ZADD', KEYS[3], ARGV[i + 1], ARGV[i])
  end
end
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', time[1] - ARGV[3])
return 1
