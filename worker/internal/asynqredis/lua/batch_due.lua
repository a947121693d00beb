-- batch_due.lua: returns what a scheduler of a batch has to know once a second.
--
-- KEYS  1 the batch (hash)  2 its firings that have not ended (set)
-- ARGV  nothing
-- reply now (us), the last tick that was decided (s, year 1 for none), then the open firings

local time = redis.call('TIME')
local reply = {time[1] * 1000000 + time[2], redis.call('HGET', KEYS[1], 'last') or -62135596800}
local open = redis.call('SMEMBERS', KEYS[2])
for i = 1, #open do reply[#reply + 1] = open[i] end
return reply
