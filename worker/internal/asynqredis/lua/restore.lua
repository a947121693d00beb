-- restore.lua: puts back an active task that goes on waiting: no slot was free, or it was denied or
-- refused, or a call of its handler was. Nothing is counted: no retry, and no task as processed or failed.
--
-- KEYS  1 active (list)  2 lease (sorted set)  3 scheduled (sorted set)  4 pending (list)
--       5 lines (dequeue.lua)  6 the task
-- ARGV  1 its ID  2 key of the call that made it active
--       3 score (s): when forward finds it; "" for pending  4 now (s)
--       5 mark of its join; "front" if it then joins in front; "" if it waits in no line; "keep" to keep its own
--       6 line in which it waits, or ""  7 message: the task as asynq stores it, or "" to keep its own
-- reply 1; 2: it is due now, as its ticket left the line while it was active (pick.lua); 0: not active by that call
-- A call that is repeated after its reply was lost answers the same, and leaves the task to who picked it up since.

local id, call, score, mark, message = ARGV[1], ARGV[2], ARGV[3], ARGV[5], ARGV[7]
local state, active_by, ticket_left, restored, lock, lock_for = unpack(redis.call('HMGET', KEYS[6],
  'state', 'sluice_call', 'sluice_ticket_left', 'sluice_restored', 'unique_key', 'sluice_lock'))
local needs_ticket = score ~= '' and mark ~= '' and mark ~= 'front' -- it waits until its ticket is taken
local has_no_ticket = needs_ticket and ticket_left == call
local reply = has_no_ticket and 2 or 1
if restored == call then return reply end -- it is a repeated call
if state ~= 'active' or active_by ~= call or redis.call('LREM', KEYS[1], 1, id) == 0 then return 0 end
redis.call('ZREM', KEYS[2], id)
redis.call('HSET', KEYS[6], 'state', score == '' and 'pending' or 'scheduled', 'sluice_restored', call)
if message ~= '' then redis.call('HSET', KEYS[6], 'msg', message) end
if has_no_ticket then mark, score = 'front', ARGV[4] end
if mark ~= 'keep' then redis.call('HSET', KEYS[6], 'sluice_join', mark) end
if score == '' then
  redis.call('RPUSH', KEYS[4], id) -- asynq takes from the right: the task is next again
else
  redis.call('ZADD', KEYS[3], score, id)
  keep_waiting(KEYS[6], lock, id, lock_for, score - ARGV[4])
end
if mark ~= '' and ARGV[6] ~= '' then join_line(KEYS[5], ARGV[6]) end
return reply
