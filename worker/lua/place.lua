-- place.lua: enqueues a task that stands in line, as asynq's client would schedule it.
--
-- KEYS  1 the task  2 scheduled (sorted set)  3 the lock of a unique task, if it is one
-- ARGV  1 message  2 task ID  3 when it comes if nobody calls it (s)  4 how long that is from now (s)
--       5 for how long the lock holds besides (s)  6 nonce: of this enqueue
-- reply 1 enqueued, 0 the ID is taken, -1 the lock is taken

-- A call that is repeated after its reply was lost finds what it has enqueued itself.
if redis.call('HGET', KEYS[1], 'sluice_placed') == ARGV[6] then return 1 end

if KEYS[3] and not redis.call('SET', KEYS[3], ARGV[2], 'NX', 'EX', ARGV[4] + ARGV[5]) then return -1 end
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 'msg', ARGV[1], 'state', 'scheduled', 'sluice_placed', ARGV[6])
if KEYS[3] then redis.call('HSET', KEYS[1], 'unique_key', KEYS[3], 'sluice_lock', ARGV[5]) end
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[2])
return 1
