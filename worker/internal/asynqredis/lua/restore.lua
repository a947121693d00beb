-- restore.lua: puts active tasks of one queue back to where they wait, that did not run or were denied.
-- Nothing is counted: neither a retry, nor as processed or failed.
--
-- KEYS  1 active (list)  2 lease (sorted set)  3 scheduled (sorted set)  4 pending (list)
--       5 lines (dequeue.lua)
-- ARGV  1 prefix of the task keys  2 key of the call that made them active
--       3 score (s): when forward finds them; "" for pending  4 seconds until then
--       5 mark of their join; "front" for tasks that are to join then; "" if they wait in no line;
--         "keep" to keep theirs  6 line in which they wait, or ""
--       7 message: the task as asynq stores it, or "" to keep theirs, then the IDs
-- reply of the last task: 1, 2 if it is due now, as its ticket has left the line, or 0 if it is not active
--       by that call
--
-- A call that is repeated after its reply was lost answers the same, and must not take a task from a
-- server that has picked it up since.

local call, score, message = ARGV[2], ARGV[3], ARGV[7]
local restored, scores, reply = {}, {}, 0
for i = 8, #ARGV do
  local id = ARGV[i]
  local key = ARGV[1] .. id
  local found = redis.call('HMGET', key, 'state', 'sluice_call', 'sluice_left', 'sluice_restored', 'unique_key', 'sluice_lock')
  local mark, at = ARGV[5], score
  reply = 1
  if score ~= '' and mark ~= '' and mark ~= 'front' and found[3] == call then
    mark, at, reply = 'front', score - ARGV[4], 2
  end
  if found[4] == call then
    -- it is a repeated call
  elseif found[1] ~= 'active' or found[2] ~= call or redis.call('LREM', KEYS[1], 1, id) == 0 then
    reply = 0
  else
    redis.call('HSET', key, 'state', score == '' and 'pending' or 'scheduled', 'sluice_restored', call)
    if message ~= '' then redis.call('HSET', key, 'msg', message) end
    if mark ~= 'keep' then redis.call('HSET', key, 'sluice_join', mark) end
    restored[#restored + 1] = id
    scores[#scores + 1] = at
    scores[#scores + 1] = id
    -- What our client enqueued keeps its lock while it waits, and then for as long as it was to.
    if score ~= '' and found[6] then keep_lock(found[5], id, found[6] + ARGV[4]) end
  end
end
if #restored == 0 then return reply end
redis.call('ZREM', KEYS[2], unpack(restored))
if score == '' then
  -- Asynq takes from the right: the first of them is the next again.
  local backwards = {}
  for i = #restored, 1, -1 do backwards[#backwards + 1] = restored[i] end
  redis.call('RPUSH', KEYS[4], unpack(backwards))
else
  redis.call('ZADD', KEYS[3], unpack(scores))
end
if ARGV[5] ~= '' and ARGV[6] ~= '' and redis.call('ZADD', KEYS[5], 'NX', '0', ARGV[6]) == 1 then
  redis.call('PEXPIRE', KEYS[5], 86400000)
end
return reply
