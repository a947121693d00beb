-- dequeue.lua: makes pending tasks of one queue active, as asynq's dequeue does, but several at once.
-- It also keeps the list of the lines in which tasks of the queue wait. A server that asks a line
-- watches it. Once the watch has lapsed, the next server that calls this is told to ask the line.
--
-- KEYS  1 what this process dequeued last: key of the call, IDs  2 lines, by when their watch lapses (sorted set)
--       3 pending (list)  4 paused  5 active (list)  6 scheduled (sorted set)  7 lease (sorted set)
-- ARGV  1 prefix of the task keys  2 end of the lease (s)  3 the most tasks to return
--       4 key of this call, then the lines that this server watches
-- reply 1 if the queue is paused, the lines that nobody watched, and the messages, in order
--
-- A score is when the watch lapses, a time of Redis (ms), plus TOLD for each server that was told of the line since a
-- watch or a nudge: 1767312000123.250 lapses at ...123, and two were told. They are one number, so that a new time
-- counts anew. MOST are told before the line leaves. That takes over 5 s, after which tickets of dead servers are back.

local WATCH, TOLD, MOST = 1500, 0.125, 5 -- servers with a free slot call this every 1.25 s, or sooner
local function score_of(lapses, told) return string.format('%.3f', lapses + told * TOLD) end
local function parts_of(score) return math.floor(score), score % 1 / TOLD end -- when its watch lapses, times told
local prefix, lease_end, most, call = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local messages, leases, new_ids, unwatched = {}, {}, {}, {}
local any_key = redis.call('EXISTS', KEYS[1], KEYS[3], KEYS[4]) > 0 -- mostly none exists: that saves MGET and RPOP
local record, paused = unpack(any_key and redis.call('MGET', KEYS[1], KEYS[4]) or {})
local repeated = record and string.find(record, '[' .. cjson.encode(call) .. ',', 1, true) == 1 -- its reply was lost
if paused and not repeated then return {1, unwatched, messages} end

local listed = redis.call('ZRANGE', KEYS[2], '0', '63', 'WITHSCORES') -- lapsed ones come first
if #listed > 0 or #ARGV > 4 then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  for i = 1, #listed, 2 do
    local line, lapses, told = listed[i], parts_of(listed[i + 1])
    if lapses < now then
      unwatched[#unwatched + 1] = line
      redis.call('ZREM', KEYS[2], line)
      if told + 1 < MOST then redis.call('ZADD', KEYS[2], score_of(now + WATCH, told + 1), line) end
    end
  end
  for i = 5, #ARGV do redis.call('ZADD', KEYS[2], score_of(now + WATCH, 0), ARGV[i]) end
  redis.call('PEXPIRE', KEYS[2], 86400000)
end

local ids = {}
if repeated then
  ids = cjson.decode(record)
  table.remove(ids, 1) -- the call
elseif any_key and most ~= '0' then
  ids = redis.call('RPOP', KEYS[3], most) or {}
end
if record and #ids == 0 then redis.call('DEL', KEYS[1]) end -- the reply of the recorded call has come
for _, id in ipairs(ids) do
  local key = prefix .. id
  local message, state, active_by, lock, lock_for = unpack(redis.call('HMGET', key,
    'msg', 'state', 'sluice_call', 'unique_key', 'sluice_lock'))
  local is_active = false -- by this call
  if repeated then
    is_active = state == 'active' and active_by == call
  elseif message and is_stopped(prefix, id) then
    set_aside(KEYS[6], key, id, lock, lease_end)
  elseif message then -- without one the task was removed, and its ID left
    redis.call('HSET', key, 'state', 'active', 'sluice_call', call)
    redis.call('HDEL', key, 'pending_since')
    keep_lock(lock, id, lock_for, true)
    new_ids[#new_ids + 1], is_active = id, true
  end
  if is_active then
    messages[#messages + 1] = message
    leases[#leases + 1], leases[#leases + 2] = lease_end, id
  end
end
if #leases > 0 then redis.call('ZADD', KEYS[7], unpack(leases)) end
if #new_ids > 0 then
  redis.call('LPUSH', KEYS[5], unpack(new_ids))
  redis.call('SET', KEYS[1], cjson.encode({call, unpack(new_ids)}), 'PX', 50000)
end
return {0, unwatched, messages}
