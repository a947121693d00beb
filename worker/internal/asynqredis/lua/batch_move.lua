-- batch_move.lua: holds, releases, deletes or retries tasks of a firing.
--
-- KEYS  1 scheduled (sorted set)  2 retry (sorted set)  3 archived (sorted set)  4 pending (list)
--       5 the firing (hash)  6 stored (bitmap)  7 done (bitmap)  8 ended (bitmap)
-- ARGV  1 prefix of the task keys  2 prefix of the IDs  3 score (s) of those that are scheduled then
--       4 hold: take tasks from where they wait; release: forward has those that wait join their lines,
--         also those that were held; delete: those that wait, and count them; retry: what was archived,
--         with all its retries, then the indexes
-- reply per task 1 moved, 0 left alone
--
-- A chunk may be on its way when the firing is cancelled: store refuses its tasks, and the cursor
-- moves behind them. To delete them is to count them. Those that are in line keep their places.

local from = {scheduled = KEYS[1], retry = KEYS[2], archived = KEYS[3]}
local verb, moved, scores, reply = ARGV[4], 0, {}, {}
local cursor = tonumber(redis.call('HGET', KEYS[5], 'index') or 0)

local function cancelled(index)
  if redis.call('SETBIT', KEYS[8], index, 1) == 1 then return end
  redis.call('SETBIT', KEYS[6], index, 0) -- done, though not stored: so it is not one that was rejected
  redis.call('SETBIT', KEYS[7], index, 1)
  redis.call('HINCRBY', KEYS[5], 'cancelled', 1)
end

for i = 5, #ARGV do
  local index = ARGV[i]
  local id, key = ARGV[2] .. index, ARGV[1] .. index
  local found = redis.call('HMGET', key, 'state', 'sluice_join', 'unique_key')
  local state, held = found[1], found[2] == 'held'
  local moves = state == 'scheduled'
  if verb == 'retry' then
    moves = state == 'archived'
  elseif verb ~= 'release' then
    moves = moves and not (verb == 'hold' and held) or state == 'retry' or state == 'pending'
  end
  if moves then
    moved = moved + 1
    if verb ~= 'release' and from[state] then
      redis.call('ZREM', from[state], id)
    elseif verb ~= 'release' then
      redis.call('LREM', KEYS[4], 1, id)
    end
    if verb == 'delete' then
      redis.call('DEL', key)
      if found[3] and redis.call('GET', found[3]) == id then redis.call('DEL', found[3]) end
      cancelled(index)
    else
      if verb == 'retry' then
        redis.call('HSET', key, 'msg', redis.call('HGET', key, 'msg') .. '\48\0') -- the last value of a field counts
        redis.call('SETBIT', KEYS[8], index, 0)
      end
      if verb ~= 'release' or held then
        redis.call('HSET', key, 'state', 'scheduled', 'sluice_join', verb == 'hold' and 'held' or '')
      end
      if verb == 'hold' and found[3] and redis.call('GET', found[3]) == id then -- its lock holds meanwhile
        redis.call('EXPIRE', found[3], 366 * 86400)
      end
      scores[#scores + 1] = ARGV[3]
      scores[#scores + 1] = id
    end
  elseif verb == 'delete' and not state and tonumber(index) < cursor and redis.call('GETBIT', KEYS[6], index) == 0 then
    cancelled(index)
  end
  reply[#reply + 1] = moves and 1 or 0
end
if #scores > 0 then redis.call('ZADD', KEYS[1], unpack(scores)) end
if verb == 'retry' and moved > 0 then
  redis.call('HINCRBY', KEYS[5], 'failed', -moved)
  redis.call('HINCRBY', KEYS[5], 'retried', moved)
end
return reply
