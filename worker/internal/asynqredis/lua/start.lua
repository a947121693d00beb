-- start.lua: returns whether a task is active by a call. It can also note then that the task is about to start.
--
-- KEYS  1 the task
-- ARGV  1 key of the call that made it active  2 whether to note it: 1 or 0
-- reply 1, or 0 if it is not active by that call any more

local found = redis.call('HMGET', KEYS[1], 'state', 'sluice_call')
if found[1] ~= 'active' or found[2] ~= ARGV[1] then return 0 end
if ARGV[2] == '1' then redis.call('HSET', KEYS[1], 'sluice_started', ARGV[1]) end
return 1
