-- batch_want.lua: says what is wanted of a firing.
--
-- KEYS  1 the firing (hash)
-- ARGV  1 run, pause or cancel
-- reply 1, or 0 if it has ended, was cancelled, or is gone

local found = redis.call('HMGET', KEYS[1], 'phase', 'want')
if not found[1] or found[1] == 'ended' then return 0 end
if found[2] == 'cancel' and ARGV[1] ~= 'cancel' then return 0 end
redis.call('HSET', KEYS[1], 'want', ARGV[1])
return 1
