-- wake.lua: makes tasks whose turn has come the next that asynq picks up. It does what asynq's
-- Inspector.RunTask does, but never to a task that has run already (RunTask would run a completed
-- or archived one again), and ahead of tasks that were not called.
--
-- KEYS  1 pending (list)  2 scheduled (sorted set)  3 retry (sorted set)
--       4 the task woken last (string)  5 whether the queue is paused
-- ARGV  1 prefix of the task keys  2 now (ns)  3.. task IDs, first come first
-- reply for every ID: 1 it is pending now, 2 it was already, 3 it is active, 0 it does not wait;
--       4 in place of 1 or 2 if nobody picks it up, as the queue is paused

local paused = redis.call('EXISTS', KEYS[5]) == 1
local states = {scheduled = KEYS[2], retry = KEYS[3]}
local reply, woken = {}, {}
for i = #ARGV, 3, -1 do
  local id = ARGV[i]
  local key = ARGV[1] .. id
  local state = redis.call('HGET', key, 'state')
  local n = 0
  if state == 'pending' then
    n = paused and 4 or 2
  elseif state == 'active' then
    n = 3
  elseif states[state] and redis.call('ZREM', states[state], id) == 1 then
    redis.call('HSET', key, 'state', 'pending', 'pending_since', ARGV[2])
    woken[#woken + 1] = id
    n = paused and 4 or 1
  end
  reply[i - 2] = n
end
if #woken == 0 then return reply end

-- Asynq takes from the right. Tasks that were woken before and not picked up yet stay the first.
local last, newest, before = redis.call('GET', KEYS[4]), woken[1], 0
if last then
  local right = redis.call('LRANGE', KEYS[1], -1000, -1)
  for i, id in ipairs(right) do
    if id == last then before = #right + 1 - i end
  end
  for i = #right + 1 - before, #right do woken[#woken + 1] = right[i] end
end
if before > 0 then redis.call('LTRIM', KEYS[1], 0, -before - 1) end
redis.call('RPUSH', KEYS[1], unpack(woken))
redis.call('SET', KEYS[4], newest, 'EX', 3600)
return reply
