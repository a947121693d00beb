-- due.lua: returns which scheduled or retried tasks of one queue are due.
--
-- KEYS  1 scheduled or retry (sorted set)
-- ARGV  1 prefix of the task keys  2 now (s)  3 the most tasks to return
-- reply three per task: ID, message, mark of its join ("" if it has joined no line)

local reply, gone = {}, {}
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[2], 'LIMIT', 0, ARGV[3])
for i = 1, #ids do
  local found = redis.call('HMGET', ARGV[1] .. ids[i], 'msg', 'sluice_join')
  if found[1] then
    reply[#reply + 1] = ids[i]
    reply[#reply + 1] = found[1]
    reply[#reply + 1] = found[2] or ''
  else
    gone[#gone + 1] = ids[i]
  end
end
if #gone > 0 then redis.call('ZREM', KEYS[1], unpack(gone)) end
return reply
