-- dequeue.lua: makes pending tasks of one queue active, as asynq's dequeue does, but several at once.
--
-- KEYS  1 what this process dequeued last  2 pending (list)  3 paused  4 active (list)
--       5 lease (sorted set)
-- ARGV  1 prefix of the task keys  2 end of the lease (s)  3 the most tasks to return
--       4 key of this call
-- reply the messages, in order; or 0 if the queue is paused
--
-- The record is "CALL LENGTH:ID LENGTH:ID ...", for a call that is repeated because its reply was
-- lost.

local prefix, call = ARGV[1], ARGV[4]
local messages, leases = {}, {}
local values = redis.call('MGET', KEYS[1], KEYS[3])
local record, paused = values[1], values[2]
if record and string.sub(record, 1, #call + 1) == call .. ' ' then
  local at = #call + 2
  while at <= #record do
    local colon = string.find(record, ':', at, true)
    local last = colon + string.sub(record, at, colon - 1)
    local id = string.sub(record, colon + 1, last)
    at = last + 2
    local found = redis.call('HMGET', prefix .. id, 'state', 'sluice_call', 'msg')
    if found[1] == 'active' and found[2] == call then
      messages[#messages + 1] = found[3]
      leases[#leases + 1] = ARGV[2]
      leases[#leases + 1] = id
    end
  end
  if #leases > 0 then redis.call('ZADD', KEYS[5], unpack(leases)) end
  return messages
end

if paused then return 0 end
local ids = redis.call('RPOP', KEYS[2], ARGV[3])
if not ids then return messages end
local active, parts = {}, {call}
for i = 1, #ids do
  local id = ids[i]
  local key = prefix .. id
  local message = redis.call('HGET', key, 'msg')
  if message then -- or else the task was removed and its ID left behind
    redis.call('HSET', key, 'state', 'active', 'sluice_call', call)
    redis.call('HDEL', key, 'pending_since')
    messages[#messages + 1] = message
    active[#active + 1] = id
    leases[#leases + 1] = ARGV[2]
    leases[#leases + 1] = id
    parts[#parts + 1] = #id .. ':' .. id
  end
end
if #active > 0 then
  redis.call('LPUSH', KEYS[4], unpack(active))
  redis.call('ZADD', KEYS[5], unpack(leases))
  redis.call('SET', KEYS[1], table.concat(parts, ' '), 'PX', 50000)
end
return messages
