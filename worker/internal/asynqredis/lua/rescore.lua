-- rescore.lua: moves the time at which forward finds stored tasks of one queue, and has their messages
-- say why they wait.
--
-- KEYS  1 scheduled (sorted set)
-- ARGV  1 prefix of the task keys  2 now (s), then six per task: ID, join key, score (s), message or
--       "", how many of its bytes are those of the message before, length of the message before
-- reply how many were moved: those that are scheduled with that join key
--
-- A message is left as it is if it has become another one: the task has run since.

local scores = {}
for i = 3, #ARGV, 6 do
  local id, score, message = ARGV[i], ARGV[i + 2], ARGV[i + 3]
  local key = ARGV[1] .. id
  local found = redis.call('HMGET', key, 'state', 'sluice_join', 'unique_key', 'sluice_lock')
  if found[1] == 'scheduled' and found[2] and string.sub(found[2], 1, 16) == ARGV[i + 1] then
    scores[#scores + 1] = score
    scores[#scores + 1] = id
    if found[4] then keep_lock(found[3], id, score - ARGV[2] + found[4]) end
    local before = message ~= '' and redis.call('HGET', key, 'msg')
    local same = tonumber(ARGV[i + 4])
    if before and #before == tonumber(ARGV[i + 5]) and string.sub(before, 1, same) == string.sub(message, 1, same) then
      redis.call('HSET', key, 'msg', message)
    end
  end
end
if #scores > 0 then redis.call('ZADD', KEYS[1], 'XX', unpack(scores)) end
return #scores / 2
