-- read.lua: reads what is in force.
--
-- KEYS  1 the state: see change.lua
-- ARGV  1 known    "EPOCH VERSION" as it was read last
-- reply the time (us), and 0 if the state is still that one, else 1, its fields and values

local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local head = redis.call('HMGET', KEYS[1], 'epoch', 'version')
if (head[1] or '') .. ' ' .. (head[2] or '') == ARGV[1] then return {now, 0} end
local reply = redis.call('HGETALL', KEYS[1])
table.insert(reply, 1, 1)
table.insert(reply, 1, now)
return reply
