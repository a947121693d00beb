-- requeue.lua: puts a task that was denied back to wait, in place of whatever asynq was about to do
-- with it. Nothing is counted: neither a retry, nor as processed or failed.
--
-- KEYS  1 active (list)  2 lease (sorted set)  3 scheduled (sorted set)  4 the task
--       5 lines (dequeue.lua)  6 the lock of a unique task, if it is one
-- ARGV  1 ID  2 message: the task as asynq stores it  3 score (s): when forward finds it
--       4 seconds until then  5 denial ID: a repeat has the same
--       6 mark: join key, "." and when it was joined; "front" for a task that is to join then; or ""
--         for one that waits in no line  7 the line
-- reply 1, or 2 if the task is due now, as its ticket has left the line; or the error NOT FOUND if
--       the task is not active

local found = redis.call('HMGET', KEYS[4], 'sluice', 'sluice_lock', 'sluice_call', 'sluice_left')
local score, mark, reply = ARGV[3], ARGV[6], 1
if found[4] and found[4] == found[3] and mark ~= '' and mark ~= 'front' then
  score, mark, reply = ARGV[3] - ARGV[4], 'front', 2
end
-- A call that is repeated after its reply was lost must not take the task from a server that has
-- picked it up since.
if found[1] == ARGV[5] then return reply end

if redis.call('LREM', KEYS[1], 0, ARGV[1]) == 0 then return redis.error_reply('NOT FOUND') end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZADD', KEYS[3], score, ARGV[1])
redis.call('HSET', KEYS[4], 'msg', ARGV[2], 'state', 'scheduled', 'sluice', ARGV[5], 'sluice_join', mark)
if mark ~= '' and redis.call('ZADD', KEYS[5], 'NX', '0', ARGV[7]) == 1 then
  redis.call('PEXPIRE', KEYS[5], 86400000)
end

-- What our client enqueued keeps its lock while it waits, and then for as long as it was to.
local seconds = KEYS[6] and found[2]
if seconds then keep_lock(KEYS[6], ARGV[1], seconds + ARGV[4] + 1) end
return reply
