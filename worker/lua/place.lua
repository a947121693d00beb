-- place.lua: enqueues a task that stands in line, as asynq's client would schedule it.
--
-- KEYS  1 the task  2 scheduled (sorted set)  3 the lock of a unique task, if it is one
-- ARGV  1 message  2 task ID  3 when it comes if nobody calls it (s)  4 for how long the lock holds (s)
-- reply 1 enqueued, 0 the ID is taken, -1 the lock is taken

if KEYS[3] and not redis.call('SET', KEYS[3], ARGV[2], 'NX', 'EX', ARGV[4]) then return -1 end
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 'msg', ARGV[1], 'state', 'scheduled')
if KEYS[3] then redis.call('HSET', KEYS[1], 'unique_key', KEYS[3]) end
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[2])
return 1
