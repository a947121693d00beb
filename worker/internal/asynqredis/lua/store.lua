-- store.lua: stores tasks of one queue as asynq's client schedules them, and marks them as tasks in
-- line, which they are about to join.
--
-- KEYS  1 scheduled (sorted set)  2 lines (dequeue.lua)  3 the firing of a batch (hash)
--       4 fates of its tasks (batch_count.lua): without 4 there is no firing
-- ARGV  1 prefix of the task keys  2 score (s): when forward finds what is still there
--       3 now (s)  4 line that they join, then five per task: ID, message,
--       mark (join key, "." and a key of this store), and of a unique task lock and seconds, or "" and 0
-- reply per task: 1 stored, 0 the ID is taken or the firing takes no more tasks, -1 the lock is taken
--
-- The ID of a task of a firing ends in its index. The ID stays taken for ever: else a delayed
-- scheduler could store the task again after it has run, or was rejected, or after the firing was cancelled.

local prefix, score, fates = ARGV[1], ARGV[2], KEYS[4]
local firing = fates and KEYS[3] -- without KEYS[4], KEYS[3] may be the further key of a Cluster (cluster.go)
local closed = firing and (redis.call('HGET', firing, 'phase') ~= 'enqueue' or
  redis.call('HGET', firing, 'want') == 'cancel')
local reply, scheduled, keys, stored = {}, {}, {}, {}
for i = 5, #ARGV, 5 do keys[#keys + 1] = prefix .. ARGV[i] end
local all_free = redis.call('EXISTS', unpack(keys)) == 0 -- then only an ID that comes twice needs a look
for i = 5, #ARGV, 5 do
  local id, mark, lock, seconds = ARGV[i], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
  local key, index = prefix .. id, firing and string.match(id, '%d+$')
  local state, stored_mark, result = nil, nil, 1
  if not all_free or stored[key] then state, stored_mark = unpack(redis.call('HMGET', key, 'state', 'sluice_join')) end
  if state and stored_mark == mark then
    -- The call is repeated after its reply was lost.
  elseif closed or firing and string.find(redis.call('GETRANGE', fates, index, index), '%a') then
    result = 0
  elseif lock ~= '' and not redis.call('SET', lock, id, 'NX', 'EX', seconds + score - ARGV[3]) then
    result = -1
  elseif state then -- the ID is taken
    if lock ~= '' then redis.call('DEL', lock) end
    result = 0
  else
    redis.call('HSET', key, 'msg', ARGV[i + 1], 'state', 'scheduled', 'sluice_join', mark)
    if lock ~= '' then redis.call('HSET', key, 'unique_key', lock, 'sluice_lock', seconds) end
    if firing then redis.call('SETRANGE', fates, index, 's') end
    scheduled[#scheduled + 1], scheduled[#scheduled + 2] = score, id
    stored[key] = true
  end
  reply[#reply + 1] = result
end
if #scheduled > 0 then redis.call('ZADD', KEYS[1], unpack(scheduled)) end
join_line(KEYS[2], ARGV[4])
return reply
