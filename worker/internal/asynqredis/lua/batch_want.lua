-- batch_want.lua: records what is wanted of a firing.
--
-- KEYS  1 the firing (hash)  2 the batch (batch_fire.lua)  3 when its tenants are expected to end
-- ARGV  1 run, pause, cancel, or retry (the failed tasks, if all are enqueued)  2 name of the firing
-- reply 1, or 0 if the firing is gone, has ended, was cancelled, or cannot be retried

local asked, retries = ARGV[1], ARGV[1] == 'retry' -- a retry also ends a pause
local phase, wanted, round, stopped, failed = unpack(redis.call('HMGET', KEYS[1],
  'phase', 'want', 'round', 'stopped', 'failed'))
local resumes = wanted == 'pause' and (retries or asked == 'run')
if not phase or phase == 'ended' and not retries then return 0 end -- it is gone, or has ended
if wanted == 'cancel' and asked ~= 'cancel' then return 0 end -- it was cancelled
if retries and phase ~= 'retry' then
  if phase == 'new' or phase == 'enqueue' then return 0 end -- not all of its tasks are enqueued
  if tonumber(failed or 0) == 0 then return 0 end -- there is nothing to retry
  redis.call('HSET', KEYS[1], 'phase', 'retry', 'finished', 0, 'round', (round or 0) + 1)
  redis.call('HSET', KEYS[2], ARGV[2], 'open')
elseif resumes and stopped == '1' then
  redis.call('HSET', KEYS[1], 'stopped', 2) -- not 1: it was resumed, and stops no more until a retry (status.go)
end
if resumes then redis.call('HSET', KEYS[1], 'set_aside', 1, 'resumed', 1) end -- all join again: picks dropped tickets
if resumes or retries then -- what is expected is unknown, until a scheduler looks again
  redis.call('HDEL', KEYS[1], 'expected', 'binds', 'overdue')
  redis.call('SET', KEYS[3], 'null', 'XX', 'KEEPTTL')
end
redis.call('HSET', KEYS[1], 'want', retries and 'run' or asked)
return 1
