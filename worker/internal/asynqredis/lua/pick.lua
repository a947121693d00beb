-- pick.lua: makes tasks of one queue that wait in line active, as asynq's dequeue does with pending tasks.
--
-- KEYS  1 scheduled (sorted set)  2 active (list)  3 lease (sorted set)  4 whether the queue is paused
-- ARGV  1 prefix of the task keys  2 end of the lease (s)  3 key of this call
--       then two per task: ID, join key (the first 16 bytes of its mark: store.go)
-- reply per task its message, 1 if the queue is paused, or 2 for anything else: it is active, pending or
--       gone, has ended or failed, its firing is stopped, or it waits for something else
--
-- A call that is repeated after its reply was lost also answers with what it picked before. The ticket of a denied task
-- may be taken while the task is still active. Then `sluice_ticket_left` is the call that made it active (restore.lua).

local PAUSED, NOT_PICKED = 1, 2
local prefix, lease_end, call = ARGV[1], ARGV[2], ARGV[3]
local paused = redis.call('EXISTS', KEYS[4]) == 1
local reply, picked, leases = {}, {}, {}
for i = 4, #ARGV, 2 do
  local id = ARGV[i]
  local key = prefix .. id
  local answer, state, mark, active_by, message, lock_for, lock = NOT_PICKED, unpack(redis.call('HMGET', key,
    'state', 'sluice_join', 'sluice_call', 'msg', 'sluice_lock', 'unique_key'))
  local joined = state == 'scheduled' and mark and string.sub(mark, 1, 16) == ARGV[i + 1]
  local waits = joined and not is_stopped(prefix, id)
  if waits and paused then
    answer = PAUSED
  elseif waits then
    answer = message
    picked[#picked + 1] = id
    redis.call('HSET', key, 'state', 'active', 'sluice_call', call)
    keep_lock(lock, id, lock_for, true)
  elseif state == 'active' and active_by == call then
    answer = message
  elseif state == 'active' then
    redis.call('HSET', key, 'sluice_ticket_left', active_by or '')
  end
  if type(answer) == 'string' then
    leases[#leases + 1], leases[#leases + 2] = lease_end, id
  end
  reply[#reply + 1] = answer
end
if #picked > 0 then
  redis.call('ZREM', KEYS[1], unpack(picked))
  redis.call('LPUSH', KEYS[2], unpack(picked))
end
if #leases > 0 then redis.call('ZADD', KEYS[3], unpack(leases)) end
return reply
