-- batch_want.lua: records what is wanted of a firing.
--
-- KEYS  1 the firing (hash)  2 the batch (batch_fire.lua)  3 when its tenants are expected to end
-- ARGV  1 run, pause, cancel, or retry (the failed tasks, if all are enqueued)  2 name of the firing
-- reply 1, or 0 if the firing is gone, cancelled (unless ARGV 1 is cancel), ended (unless retry), or for retry if none
--       has failed or it still enqueues

local found = redis.call('HMGET', KEYS[1], 'phase', 'want', 'round', 'stopped')
local phase, want, retries = found[1], found[2], ARGV[1] == 'retry'
local resumes = want == 'pause' and (retries or ARGV[1] == 'run')
if not phase or want == 'cancel' and ARGV[1] ~= 'cancel' or phase == 'ended' and not retries then return 0 end
if retries and phase ~= 'retry' then
  local failed = tonumber(redis.call('HGET', KEYS[1], 'failed') or 0)
  if phase ~= 'ended' and phase ~= 'drain' or failed == 0 then return 0 end
  redis.call('HSET', KEYS[1], 'phase', 'retry', 'finished', 0, 'round', (found[3] or 0) + 1)
  redis.call('HSET', KEYS[2], ARGV[2], 'open')
elseif resumes and found[4] == '1' then
  redis.call('HSET', KEYS[1], 'stopped', 2) -- see status.go
end
if resumes then redis.call('HSET', KEYS[1], 'set_aside', 1, 'resumed', 1) end -- picks dropped tickets: all join again
if resumes or retries then -- what is expected is unknown, until a scheduler looks again
  redis.call('HDEL', KEYS[1], 'expected', 'binds', 'overdue')
  redis.call('SET', KEYS[3], 'null', 'XX', 'KEEPTTL')
end
redis.call('HSET', KEYS[1], 'want', retries and 'run' or ARGV[1])
return 1
