-- batch_want.lua: records what is wanted of a firing.
--
-- KEYS  1 the firing (hash)  2 the batch (batch_fire.lua)
-- ARGV  1 run, pause, cancel, or retry (the failed tasks, if all are enqueued)  2 name of the firing
-- reply 1, or 0: it is gone, cancelled (but for cancel) or ended (but for retry); to retry: none failed, or enqueueing

local found = redis.call('HMGET', KEYS[1], 'phase', 'want', 'round', 'stopped')
local phase, want = found[1], found[2]
if not phase or want == 'cancel' and ARGV[1] ~= 'cancel' then return 0 end
if ARGV[1] == 'retry' then
  local failed = tonumber(redis.call('HGET', KEYS[1], 'failed') or 0)
  if phase ~= 'ended' and phase ~= 'drain' or failed == 0 then return phase == 'retry' and 1 or 0 end
  if want == 'pause' then redis.call('HSET', KEYS[1], 'aside', 1, 'again', 1) end
  redis.call('HSET', KEYS[1], 'phase', 'retry', 'want', 'run', 'finished', 0, 'round', (found[3] or 0) + 1)
  redis.call('HSET', KEYS[2], ARGV[2], 'open')
  return 1
end
if phase == 'ended' then return 0 end
if want == 'pause' and ARGV[1] == 'run' then -- even during a resume: while it was paused, picks dropped tickets
  redis.call('HSET', KEYS[1], 'aside', 1, 'again', 1, 'stopped', found[4] == '1' and 2 or found[4] or 0)
end
redis.call('HSET', KEYS[1], 'want', ARGV[1])
return 1
