-- batch_refuse.lua: counts tasks of a firing that were not enqueued, each once.
--
-- KEYS  1 the firing (hash)  2 ended (bitmap)
-- ARGV  the positions
-- reply how many were counted

local counted = 0
for i = 1, #ARGV do
  if redis.call('SETBIT', KEYS[2], ARGV[i], 1) == 0 then counted = counted + 1 end
end
redis.call('HINCRBY', KEYS[1], 'refused', counted)
return counted
