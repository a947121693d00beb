-- there.lua: returns which tasks of one queue exist, and may still run.
--
-- KEYS  the tasks (hashes)
-- ARGV  nothing
-- reply per task: 1 it may run, 0 it was deleted, archived or completed

local reply = {}
for i = 1, #KEYS do
  local state = redis.call('HGET', KEYS[i], 'state')
  reply[i] = state and state ~= 'archived' and state ~= 'completed' and 1 or 0
end
return reply
