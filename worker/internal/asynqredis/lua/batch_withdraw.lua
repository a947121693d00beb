-- batch_withdraw.lua: takes tasks of a firing from where they wait: to hold them, or to delete them.
--
-- KEYS  1 scheduled (sorted set)  2 retry (sorted set)  3 pending (list)  4 the firing (hash)
--       5 ended (bitmap)  6 stored (bitmap)
-- ARGV  1 prefix of the task keys  2 prefix of the IDs
--       3 score (s) at which a held task would be found, or "" to delete, then the positions
-- reply how many were withdrawn
--
-- A chunk may be on its way when the firing is cancelled: store refuses its tasks, and the cursor
-- moves behind them. To delete them is to count them.

local moved, held = 0, {}
local cursor = tonumber(redis.call('HGET', KEYS[4], 'position') or 0)
for i = 4, #ARGV do
  local id = ARGV[2] .. ARGV[i]
  local key = ARGV[1] .. ARGV[i]
  local found = redis.call('HMGET', key, 'state', 'sluice_join', 'unique_key')
  local state = found[1]
  if state == 'scheduled' and not (ARGV[3] ~= '' and found[2] == 'held') or state == 'retry' or state == 'pending' then
    if state == 'scheduled' then
      redis.call('ZREM', KEYS[1], id)
    elseif state == 'retry' then
      redis.call('ZREM', KEYS[2], id)
    else
      redis.call('LREM', KEYS[3], 1, id)
    end
    if ARGV[3] ~= '' then
      redis.call('HSET', key, 'state', 'scheduled', 'sluice_join', 'held')
      held[#held + 1] = ARGV[3]
      held[#held + 1] = id
    else
      redis.call('DEL', key)
      if found[3] and redis.call('GET', found[3]) == id then redis.call('DEL', found[3]) end
      if redis.call('SETBIT', KEYS[5], ARGV[i], 1) == 0 then redis.call('HINCRBY', KEYS[4], 'cancelled', 1) end
    end
    moved = moved + 1
  elseif not state and ARGV[3] == '' and tonumber(ARGV[i]) < cursor and redis.call('GETBIT', KEYS[6], ARGV[i]) == 0 then
    if redis.call('SETBIT', KEYS[5], ARGV[i], 1) == 0 then redis.call('HINCRBY', KEYS[4], 'cancelled', 1) end
  end
end
if #held > 0 then redis.call('ZADD', KEYS[1], unpack(held)) end
return moved
