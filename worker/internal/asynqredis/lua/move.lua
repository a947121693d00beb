-- move.lua: moves, drops or looks at waiting tasks of one queue.
--
-- KEYS  1 scheduled (sorted set)  2 retry (sorted set)  3 archived (sorted set)  4 pending (list)
--       5 lines (dequeue.lua)
-- ARGV  1 prefix of the task keys  2 prefix of the keys of groups  3 now (s)  4 now (ns)
--       then seven per task: ID; which task of that ID: a join key, "due", or "any" if scheduled or to be retried;
--       where it goes: "archive", "delete", "look" (nowhere; for "any"), "pending" as asynq enqueues or forwards it, or
--       score (s) at which forward finds it; mark and line if it joins a line, or ""; new message or "";
--       length of the old message
-- reply per task 1: moved, or it has this mark already; 0: it is elsewhere, or may run still; -1: it is not there,
--       archived or completed. So a repeated move answers 0 or -1, unless it has a mark, or goes to a score
--
-- Tasks are marked before they join: without the mark a pick would take them for other tasks.
-- If the stored message has another length, the task has run since: the message stays. Comparing bytes costs too much.

local now, archives, reply = tonumber(ARGV[3]), false, {}
local moved, pending, scheduled, lines = {}, {}, {}, {} -- IDs, IDs, scores and IDs, and a set of the lines to join
for i = 5, #ARGV, 7 do
  local id, which, to, mark, line, message, old_length = unpack(ARGV, i, i + 6)
  local key = ARGV[1] .. id
  local state, join, group, lock, seconds =
    unpack(redis.call('HMGET', key, 'state', 'sluice_join', 'group', 'unique_key', 'sluice_lock'))
  local moves
  if which == 'due' then
    local due = redis.call('ZSCORE', KEYS[1], id) or redis.call('ZSCORE', KEYS[2], id)
    moves = due and tonumber(due) <= now
  elseif which == 'any' then
    moves = (state == 'scheduled' or state == 'retry') and to ~= 'look'
  else
    moves = state == 'scheduled' and join and string.sub(join, 1, 16) == which
  end
  if moves then
    moved[#moved + 1] = id
    if to == 'delete' then
      delete_task(key, id, lock)
    elseif to == 'archive' then
      redis.call('HSET', key, 'state', 'archived')
      redis.call('ZADD', KEYS[3], now, id)
      keep_lock(lock, id, seconds, true)
      archives = true
    elseif to ~= 'pending' then -- `to` is a score
      redis.call('HSET', key, 'state', 'scheduled')
      scheduled[#scheduled + 1], scheduled[#scheduled + 2] = to, id
      keep_waiting(key, lock, id, seconds, to - now)
      if mark ~= '' then
        redis.call('HSET', key, 'sluice_join', mark)
        lines[line] = true
      end
      if message ~= '' and redis.call('HSTRLEN', key, 'msg') == tonumber(old_length) then
        redis.call('HSET', key, 'msg', message)
      end
    elseif group and group ~= '' then
      redis.call('ZADD', ARGV[2] .. group, now, id)
      redis.call('HSET', key, 'state', 'aggregating')
    else
      pending[#pending + 1] = id
      redis.call('HSET', key, 'state', 'pending', 'pending_since', ARGV[4])
      keep_lock(lock, id, seconds, true)
    end
  end
  local has_moved = moves or mark ~= '' and join == mark -- or it has this mark, as a repeated call finds it
  local has_ended = not state or state == 'archived' or state == 'completed'
  reply[#reply + 1] = has_moved and 1 or has_ended and -1 or 0
end
if #moved > 0 then
  redis.call('ZREM', KEYS[1], unpack(moved))
  redis.call('ZREM', KEYS[2], unpack(moved))
end
if #pending > 0 then redis.call('LPUSH', KEYS[4], unpack(pending)) end
if #scheduled > 0 then redis.call('ZADD', KEYS[1], unpack(scheduled)) end
if archives then -- as asynq does: those older than 90 days go, and the newest 9,999 stay
  local expired = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now - 90 * 86400)
  for _, ids in ipairs({expired, redis.call('ZRANGE', KEYS[3], 0, -10000)}) do
    for _, id in ipairs(ids) do
      delete_task(ARGV[1] .. id, id)
      redis.call('ZREM', KEYS[3], id)
    end
  end
end
for line in pairs(lines) do join_line(KEYS[5], line) end
return reply
