-- drop.lua: archives or deletes tasks of one queue that wait, as asynq's tools do one by one.
--
-- KEYS  1 scheduled (sorted set)  2 retry (sorted set)  3 archived (sorted set)
-- ARGV  1 prefix of the task keys  2 "archive", "delete", or "" to look only  3 now (s)
--       4 archived before that (s) is forgotten, then the IDs
-- reply per task 1 dropped, 0 it may run still, -1 it is not there, archived or completed

local how, from, reply = ARGV[2], {scheduled = KEYS[1], retry = KEYS[2]}, {}
for i = 5, #ARGV do
  local id, n = ARGV[i], 0
  local key = ARGV[1] .. id
  local found = redis.call('HMGET', key, 'state', 'unique_key')
  local state, lock = found[1], found[2]
  if not state or state == 'archived' or state == 'completed' then
    n = -1
  elseif how ~= '' and from[state] and redis.call('ZREM', from[state], id) == 1 then
    n = 1
    if how == 'archive' then
      redis.call('HSET', key, 'state', 'archived')
      redis.call('ZADD', KEYS[3], ARGV[3], id)
    else
      redis.call('DEL', key)
      if lock and redis.call('GET', lock) == id then redis.call('DEL', lock) end
    end
  end
  reply[#reply + 1] = n
end
if how == 'archive' then
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', ARGV[4])
  redis.call('ZREMRANGEBYRANK', KEYS[3], 0, -10000) -- asynq's bound: 9,999 stay
end
return reply
