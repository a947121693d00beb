-- forward.lua: moves tasks of one queue that were due: to wait in line, or as asynq forwards them.
--
-- KEYS  1 scheduled or retry (sorted set): where they were found  2 scheduled (sorted set)
--       3 pending (list)  4 lines (dequeue.lua)
-- ARGV  1 prefix of the task keys  2 prefix of the keys of groups  3 now (s)  4 now (ns)
--       then four per task: ID, score (s) or "" for pending, mark of its join, the line
-- reply per task 1 moved (also: by an earlier send of this call), 0 it is not due any more
--
-- Tasks are marked before they join: a pick that came between would take them for others.

local now = tonumber(ARGV[3])
local reply, moved, pending, scores, lines = {}, {}, {}, {}, {}
for i = 5, #ARGV, 4 do
  local id, score = ARGV[i], ARGV[i + 1]
  local key = ARGV[1] .. id
  local at = redis.call('ZSCORE', KEYS[1], id)
  local n = 0
  if at and tonumber(at) <= now then
    n = 1
    moved[#moved + 1] = id
    local found = redis.call('HMGET', key, 'group', 'unique_key', 'sluice_lock')
    if score ~= '' then
      scores[#scores + 1] = score
      scores[#scores + 1] = id
      redis.call('HSET', key, 'state', 'scheduled', 'sluice_join', ARGV[i + 2])
      lines[ARGV[i + 3]] = true
      if found[3] then keep_lock(found[2], id, score - now + found[3]) end
    elseif found[1] and found[1] ~= '' then
      redis.call('ZADD', ARGV[2] .. found[1], now, id)
      redis.call('HSET', key, 'state', 'aggregating')
    else
      pending[#pending + 1] = id
      redis.call('HSET', key, 'state', 'pending', 'pending_since', ARGV[4])
    end
  elseif score ~= '' and redis.call('HGET', key, 'sluice_join') == ARGV[i + 2] then
    n = 1
  end
  reply[#reply + 1] = n
end
if #moved > 0 then redis.call('ZREM', KEYS[1], unpack(moved)) end
if #pending > 0 then redis.call('LPUSH', KEYS[3], unpack(pending)) end
if #scores > 0 then redis.call('ZADD', KEYS[2], unpack(scores)) end
for line in pairs(lines) do
  if redis.call('ZADD', KEYS[4], 'NX', '0', line) == 1 then redis.call('PEXPIRE', KEYS[4], 86400000) end
end
return reply
