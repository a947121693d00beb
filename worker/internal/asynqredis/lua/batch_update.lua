-- batch_update.lua: writes fields of a firing, for the holder of its lease.
--
-- KEYS  1 the firing (hash)  2 the batch's firings that have not ended (set)
-- ARGV  1 the holder  2 name of the firing  3 how long the firing is kept (s)
--       then two per field: name, value
--       A name that begins with ":" is that of a value that is kept beside the firing
-- reply what is wanted of the firing: run, pause or cancel; or an error that begins with LOST for
--       who does not hold it

if redis.call('HGET', KEYS[1], 'holder') ~= ARGV[1] then return redis.error_reply('LOST the lease') end
if redis.call('HGET', KEYS[1], 'phase') == 'ended' then return redis.error_reply('LOST the lease') end
for i = 4, #ARGV, 2 do
  if string.sub(ARGV[i], 1, 1) == ':' then
    redis.call('SET', KEYS[1] .. ARGV[i], ARGV[i + 1], 'EX', ARGV[3])
  else
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
if redis.call('HGET', KEYS[1], 'phase') == 'ended' then
  redis.call('HSET', KEYS[1], 'finished', redis.call('TIME')[1])
  redis.call('SREM', KEYS[2], ARGV[2])
end
return redis.call('HGET', KEYS[1], 'want') or 'run'
