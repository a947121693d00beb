-- rescore.lua: moves the time at which forward finds stored tasks of one queue, and has their messages
-- say why they wait.
--
-- KEYS  1 scheduled (sorted set)
-- ARGV  1 prefix of the task keys  2 now (s), then five per task: ID, join key, score (s), message or
--       "", length of the message before
-- reply how many were moved: those that are scheduled with that join key
--
-- A message of another length is left as it is: the task has run since. Its bytes are not compared, as
-- that would cost as much as all the rest.

local scores = {}
for i = 3, #ARGV, 5 do
  local id, score, message = ARGV[i], ARGV[i + 2], ARGV[i + 3]
  local key = ARGV[1] .. id
  local found = redis.call('HMGET', key, 'state', 'sluice_join', 'unique_key', 'sluice_lock')
  if found[1] == 'scheduled' and found[2] and string.sub(found[2], 1, 16) == ARGV[i + 1] then
    scores[#scores + 1] = score
    scores[#scores + 1] = id
    if found[4] then keep_lock(found[3], id, score - ARGV[2] + found[4]) end
    if message ~= '' and redis.call('HSTRLEN', key, 'msg') == tonumber(ARGV[i + 4]) then
      redis.call('HSET', key, 'msg', message)
    end
  end
end
if #scores > 0 then redis.call('ZADD', KEYS[1], 'XX', unpack(scores)) end
return #scores / 2
