-- restore.lua: puts tasks of one queue that were picked or dequeued, and did not run, back to where
-- they were.
--
-- KEYS  1 active (list)  2 lease (sorted set)  3 scheduled (sorted set)  4 pending (list)
-- ARGV  1 prefix of the task keys  2 key of the call that made them active
--       3 score (s) for those that were picked, or "" for those that were pending
--       4 seconds until then  5 mark by which they join, or "" to keep theirs, then the IDs
-- reply how many were put back: those that are active by that call
--
-- A scheduled one whose ticket has left since then is due at once, and joins in front.

local restored, scores = {}, {}
for i = 6, #ARGV do
  local id = ARGV[i]
  local key = ARGV[1] .. id
  local found = redis.call('HMGET', key, 'state', 'sluice_call', 'unique_key', 'sluice_lock', 'sluice_left')
  if found[1] == 'active' and found[2] == ARGV[2] and redis.call('LREM', KEYS[1], 1, id) == 1 then
    restored[#restored + 1] = id
    redis.call('HSET', key, 'state', ARGV[3] == '' and 'pending' or 'scheduled')
    local score, mark = ARGV[3], ARGV[5]
    if score ~= '' and found[5] == ARGV[2] then score, mark = score - ARGV[4], 'front' end
    if mark ~= '' then redis.call('HSET', key, 'sluice_join', mark) end
    scores[#scores + 1] = score
    scores[#scores + 1] = id
    if ARGV[3] ~= '' and found[4] then keep_lock(found[3], id, found[4] + ARGV[4]) end
  end
end
if #restored == 0 then return 0 end
redis.call('ZREM', KEYS[2], unpack(restored))
if ARGV[3] == '' then
  -- Asynq takes from the right: the first of them is the next again.
  local backwards = {}
  for i = #restored, 1, -1 do backwards[#backwards + 1] = restored[i] end
  redis.call('RPUSH', KEYS[4], unpack(backwards))
else
  redis.call('ZADD', KEYS[3], unpack(scores))
end
return #restored
