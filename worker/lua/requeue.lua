-- requeue.lua: puts a task that was denied back to wait, in place of whatever asynq was about
-- to do with it. Nothing is counted: neither a retry, nor as processed or failed.
--
-- KEYS  1 asynq:{QUEUE}:active
--       2 asynq:{QUEUE}:lease
--       3 asynq:{QUEUE}:retry
--       4 asynq:{QUEUE}:t:ID     the task
--       5 the lock of a unique task, if it is one
-- ARGV  1 id
--       2 message: the task as asynq stores it
--       3 process_at: seconds since 1970
--       4 nonce: of this denial
--       5 wait: seconds until process_at
-- reply OK, or the error NOT FOUND if the task is not active

-- A call that is repeated after its reply was lost must not take the task from whoever has
-- picked it up since.
if redis.call('HGET', KEYS[4], 'sluice') == ARGV[4] then return redis.status_reply('OK') end

if redis.call('LREM', KEYS[1], 0, ARGV[1]) == 0 then return redis.error_reply('NOT FOUND') end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZADD', KEYS[3], ARGV[3], ARGV[1])
redis.call('HSET', KEYS[4], 'msg', ARGV[2], 'state', 'retry', 'sluice', ARGV[4])

-- What our client enqueued keeps its lock while it waits, and then for as long as it was to (place.lua).
local lock_for = KEYS[5] and redis.call('HGET', KEYS[4], 'sluice_lock')
if lock_for then
  local seconds = lock_for + ARGV[5] + 1
  if not redis.call('SET', KEYS[5], ARGV[1], 'NX', 'EX', seconds) and redis.call('GET', KEYS[5]) == ARGV[1]
    and redis.call('TTL', KEYS[5]) < seconds then
    redis.call('EXPIRE', KEYS[5], seconds)
  end
end
return redis.status_reply('OK')
