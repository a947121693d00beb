-- batch_move.lua: sets aside, releases, deletes or retries tasks of a firing.
--
-- KEYS  1 scheduled (sorted set)  2 retry (sorted set)  3 archived (sorted set)  4 pending (list)
--       5 the firing (hash)  6 fates of its tasks (batch_count.lua)
-- ARGV  1 prefix of the task keys  2 prefix of the IDs  3 now (s)
--       4 set_aside, release, delete or retry: see SetAside (firing.go); then the indexes
-- reply per task 1 moved, 0 left alone
--
-- Tasks may be on their way to store.lua when their firing is cancelled. They are refused there, and lie before the
-- firing's cursor all the same. Delete counts them, too. Tasks that are released while in line keep their positions.

local verb, reply = ARGV[4], {}
local sources = {scheduled = KEYS[1], retry = KEYS[2], pending = KEYS[4]} -- by state: where a task that moves is listed
if verb == 'release' then sources = {scheduled = KEYS[1]} end
if verb == 'retry' then sources = {archived = KEYS[3]} end
local cursor = tonumber(redis.call('HGET', KEYS[5], 'index') or 0) -- every task before this index was tried once
for i = 5, #ARGV do
  local index = ARGV[i]
  local id, key = ARGV[2] .. index, ARGV[1] .. index
  local fate = string.match(redis.call('GETRANGE', KEYS[6], index, index), '%a') -- nil: neither stored nor counted
  local state, mark, lock = unpack(redis.call('HMGET', key, 'state', 'sluice_join', 'unique_key'))
  local is_aside = mark == 'set_aside' and state == 'scheduled'
  local moves = sources[state] and not (is_aside and verb == 'set_aside')
  if moves then
    if state == 'pending' then redis.call('LREM', KEYS[4], 1, id) else redis.call('ZREM', sources[state], id) end
    if verb == 'delete' then
      delete_task(key, id, lock)
    elseif verb == 'set_aside' then
      set_aside(KEYS[1], key, id, lock, ARGV[3])
    else
      redis.call('ZADD', KEYS[1], ARGV[3], id)
      if verb == 'retry' or is_aside then redis.call('HSET', key, 'state', 'scheduled', 'sluice_join', '') end
    end
    if verb == 'retry' then
      redis.call('HSET', key, 'msg', redis.call('HGET', key, 'msg') .. '\48\0') -- `retried` = 0: the last value counts
      redis.call('SETRANGE', KEYS[6], index, 's')
      redis.call('HINCRBY', KEYS[5], 'failed', -1)
      redis.call('HINCRBY', KEYS[5], 'retried', 1)
    end
  end
  local was_refused = not fate and not state and tonumber(index) < cursor
  local was_waiting = moves and (not fate or fate == 's')
  if verb == 'delete' and (was_refused or was_waiting) then
    redis.call('SETRANGE', KEYS[6], index, 'c')
    redis.call('HINCRBY', KEYS[5], 'cancelled', 1)
  end
  reply[#reply + 1] = moves and 1 or 0
end
return reply
