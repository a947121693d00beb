-- activate.lua: makes stored tasks of one queue pending, as asynq's client enqueues them: those whose join failed, and exempt ones.
--
-- KEYS  1 pending (list)  2 scheduled (sorted set)
-- ARGV  1 prefix of the task keys  2 now (ns), then two per task: ID, join key
-- reply how many became pending: those that were scheduled with that join key

local pending = {}
for i = 3, #ARGV, 2 do
  local id = ARGV[i]
  local key = ARGV[1] .. id
  local found = redis.call('HMGET', key, 'state', 'sluice_join', 'unique_key', 'sluice_lock')
  if found[1] == 'scheduled' and found[2] and string.sub(found[2], 1, 16) == ARGV[i + 1] then
    redis.call('HSET', key, 'state', 'pending', 'pending_since', ARGV[2])
    if found[4] and redis.call('GET', found[3]) == id then redis.call('EXPIRE', found[3], found[4]) end
    pending[#pending + 1] = id
  end
end
if #pending > 0 then
  redis.call('ZREM', KEYS[2], unpack(pending))
  redis.call('LPUSH', KEYS[1], unpack(pending))
end
return #pending
