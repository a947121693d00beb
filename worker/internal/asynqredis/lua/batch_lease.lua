-- batch_lease.lua: takes or renews the lease of a firing. Who has it does the firing's work.
--
-- KEYS  1 the firing (hash), then all else that is kept of it
-- ARGV  1 the holder, or "" to read only  2 for how long (ms; 0 gives it back)
--       3 how long the firing is kept (s)
-- reply the fields of the firing and their values; nothing if another holds it, or it is gone

local found = redis.call('HMGET', KEYS[1], 'phase', 'holder', 'until')
if not found[1] then return {} end
if ARGV[1] ~= '' then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  if found[1] == 'ended' or found[2] and found[2] ~= ARGV[1] and tonumber(found[3]) > now then return {} end
  redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'until', string.format('%.0f', now + ARGV[2]))
  for i = 1, #KEYS do redis.call('EXPIRE', KEYS[i], ARGV[3]) end
end
return redis.call('HGETALL', KEYS[1])
