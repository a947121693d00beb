-- expired.lua: returns which active tasks of one queue were made active by which call, the oldest
-- first.
--
-- KEYS  1 active (list)  2 lease (sorted set)
-- ARGV  1 prefix of the task keys  2 when (s) a lease has expired
-- reply three per task: ID, key of the call ("" if it was not ours), and "1" if its lease has expired

local reply, expired = {}, {}
local ids = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', ARGV[2])
for i = 1, #ids do expired[ids[i]] = '1' end
ids = redis.call('LRANGE', KEYS[1], 0, -1)
for i = #ids, 1, -1 do
  reply[#reply + 1] = ids[i]
  reply[#reply + 1] = redis.call('HGET', ARGV[1] .. ids[i], 'sluice_call') or ''
  reply[#reply + 1] = expired[ids[i]] or ''
end
return reply
