-- read.lua: reads what is in force.
--
-- KEYS  1 the state: see change.lua
-- ARGV  1 known    the mark of the state as it was read last
-- reply the time (us), and if the state has another mark: that, and its fields and values

local t = redis.call('TIME')
local now = string.format('%d', t[1] * 1000000 + t[2])
local mark = redis.call('HGET', KEYS[1], 'mark') or ''
if mark == ARGV[1] then return {now} end
return {now, mark, unpack(redis.call('HGETALL', KEYS[1]))}
