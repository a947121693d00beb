-- rescore.lua: moves the time at which forward finds stored tasks of one queue.
--
-- KEYS  1 scheduled (sorted set)
-- ARGV  1 prefix of the task keys  2 now (s), then three per task: ID, join key, score (s)
-- reply how many were moved: those that are scheduled with that join key

local scores = {}
for i = 3, #ARGV, 3 do
  local id, score = ARGV[i], ARGV[i + 2]
  local found = redis.call('HMGET', ARGV[1] .. id, 'state', 'sluice_join', 'unique_key', 'sluice_lock')
  if found[1] == 'scheduled' and found[2] and string.sub(found[2], 1, 16) == ARGV[i + 1] then
    scores[#scores + 1] = score
    scores[#scores + 1] = id
    if found[4] then keep_lock(found[3], id, score - ARGV[2] + found[4]) end
  end
end
if #scores > 0 then redis.call('ZADD', KEYS[1], 'XX', unpack(scores)) end
return #scores / 2
