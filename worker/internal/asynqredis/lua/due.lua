-- due.lua: returns tasks of one queue whose time has come, the earliest first.
--
-- KEYS  one of ours, as a call of asynq's begins with lease  2 scheduled, retry or lease (sorted set)
-- ARGV  1 prefix of the task keys  2 score (s) that has come  3 the most tasks to return
--       then names of fields, of which each task has the first
-- reply per task its ID, its score, and its fields, "" for each that is not there
--
-- An ID whose task is gone is removed.

local found = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', ARGV[2], 'WITHSCORES', 'LIMIT', '0', ARGV[3])
local reply = {}
for i = 1, #found, 2 do
  local id, fields = found[i], redis.call('HMGET', ARGV[1] .. found[i], unpack(ARGV, 4))
  if fields[1] then
    reply[#reply + 1] = id
    reply[#reply + 1] = found[i + 1]
    for j = 1, #ARGV - 3 do reply[#reply + 1] = fields[j] or '' end
  else
    redis.call('ZREM', KEYS[2], id)
  end
end
return reply
