-- unstore.lua: removes stored tasks of one queue that were refused a place in line.
--
-- KEYS  1 scheduled (sorted set)
-- ARGV  1 prefix of the task keys, then two per task: ID, join key
-- reply how many were removed: those that are scheduled with that join key

local removed = {}
for i = 2, #ARGV, 2 do
  local id = ARGV[i]
  local key = ARGV[1] .. id
  local found = redis.call('HMGET', key, 'state', 'sluice_join', 'unique_key')
  if found[1] == 'scheduled' and found[2] and string.sub(found[2], 1, 16) == ARGV[i + 1] then
    redis.call('DEL', key)
    if found[3] and redis.call('GET', found[3]) == id then redis.call('DEL', found[3]) end
    removed[#removed + 1] = id
  end
end
if #removed > 0 then redis.call('ZREM', KEYS[1], unpack(removed)) end
return #removed
