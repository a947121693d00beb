-- batch_release.lua: makes tasks of a firing due that wait: forward has them join their lines, those
-- that were held too. Those that are in line keep their places.
--
-- KEYS  1 scheduled (sorted set)
-- ARGV  1 prefix of the task keys  2 prefix of the IDs  3 now (s), then the positions
-- reply how many wait

local due = {}
for i = 4, #ARGV do
  local key = ARGV[1] .. ARGV[i]
  local found = redis.call('HMGET', key, 'state', 'sluice_join')
  if found[1] == 'scheduled' then
    if found[2] == 'held' then redis.call('HSET', key, 'sluice_join', '') end
    due[#due + 1] = ARGV[3]
    due[#due + 1] = ARGV[2] .. ARGV[i]
  end
end
if #due > 0 then redis.call('ZADD', KEYS[1], unpack(due)) end
return #due / 2
