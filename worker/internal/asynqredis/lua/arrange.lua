-- arrange.lua: has stored tasks of one queue wait, become pending as asynq's client enqueues them,
-- or go, as their joins have said.
--
-- KEYS  1 pending (list)  2 scheduled (sorted set)
-- ARGV  1 prefix of the task keys  2 now (s)  3 now (ns), then five per task: ID, join key, "gone",
--       "pending" or score (s) at which forward finds it, message or "", length of the one before
-- reply how many: those that were scheduled with that join key
--
-- A message of another length is left as it is: the task has run since. Its bytes are not compared,
-- as that would cost as much as all the rest.

local leaving, pending, scores, n = {}, {}, {}, 0
for i = 4, #ARGV, 5 do
  local id, to, message = ARGV[i], ARGV[i + 2], ARGV[i + 3]
  local key = ARGV[1] .. id
  local found = redis.call('HMGET', key, 'state', 'sluice_join', 'unique_key', 'sluice_lock')
  local lock, seconds = found[3], found[4]
  if found[1] == 'scheduled' and found[2] and string.sub(found[2], 1, 16) == ARGV[i + 1] then
    n = n + 1
    if to == 'gone' then
      redis.call('DEL', key)
      if lock and redis.call('GET', lock) == id then redis.call('DEL', lock) end
      leaving[#leaving + 1] = id
    elseif to == 'pending' then
      redis.call('HSET', key, 'state', 'pending', 'pending_since', ARGV[3])
      if seconds and redis.call('GET', lock) == id then redis.call('EXPIRE', lock, seconds) end
      leaving[#leaving + 1] = id
      pending[#pending + 1] = id
    else
      scores[#scores + 1] = to
      scores[#scores + 1] = id
      if seconds then keep_lock(lock, id, to - ARGV[2] + seconds) end
      if message ~= '' and redis.call('HSTRLEN', key, 'msg') == tonumber(ARGV[i + 4]) then
        redis.call('HSET', key, 'msg', message)
      end
    end
  end
end
if #leaving > 0 then redis.call('ZREM', KEYS[2], unpack(leaving)) end
if #pending > 0 then redis.call('LPUSH', KEYS[1], unpack(pending)) end
if #scores > 0 then redis.call('ZADD', KEYS[2], 'XX', unpack(scores)) end
return n
