-- due.lua: returns tasks of one queue whose time has come, the earliest first. An ID whose task is gone is removed.
--
-- KEYS  1 scheduled or retry (sorted set)
-- ARGV  1 prefix of the task keys  2 now (s)  3 the most tasks to return
-- reply per task its ID, its message, and the mark of its join, "" if there is none

local reply = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[2], 'LIMIT', '0', ARGV[3])) do
  local found = redis.call('HMGET', ARGV[1] .. id, 'msg', 'sluice_join')
  if found[1] then
    for _, value in ipairs({id, found[1], found[2] or ''}) do reply[#reply + 1] = value end
  else
    redis.call('ZREM', KEYS[1], id)
  end
end
return reply
