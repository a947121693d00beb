-- move.lua: moves tasks of one queue that wait: those of a join, or those that are due.
--
-- KEYS  1 scheduled or retry (sorted set): where they are  2 scheduled (sorted set)  3 pending (list)
--       4 lines (dequeue.lua)
-- ARGV  1 prefix of the task keys  2 prefix of the keys of groups  3 now (s)  4 now (ns)
--       then seven per task: ID, key of its join, or "" for a task that is due, then where it goes: "gone",
--       "pending" as asynq enqueues or forwards it, or score (s) at which forward finds it, then
--       mark and line if it joins a line, or "", message or "", length of the message before
-- reply per task 1 moved (also: by an earlier send of this call), 0 it is elsewhere
--
-- Tasks are marked before they join: a pick that came between would take them for others.
--
-- If the message has another length, the task has run since, and its message stays. To compare the bytes
-- would cost as much as all the rest.

local now = tonumber(ARGV[3])
local reply, moved, pending, scores, lines = {}, {}, {}, {}, {}
for i = 5, #ARGV, 7 do
  local id, join_key, to, mark, message = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 5]
  local key = ARGV[1] .. id
  local found = redis.call('HMGET', key, 'state', 'sluice_join', 'group', 'unique_key', 'sluice_lock')
  local join, group, lock, seconds = found[2], found[3], found[4], found[5]
  local waits
  if join_key == '' then
    local due = redis.call('ZSCORE', KEYS[1], id)
    waits = due and tonumber(due) <= now
  else
    waits = found[1] == 'scheduled' and join and string.sub(join, 1, 16) == join_key
  end
  if waits then
    moved[#moved + 1] = id
    if to == 'gone' then
      redis.call('DEL', key)
      if lock and redis.call('GET', lock) == id then redis.call('DEL', lock) end
    elseif to ~= 'pending' then
      redis.call('HSET', key, 'state', 'scheduled')
      scores[#scores + 1] = to
      scores[#scores + 1] = id
      if mark ~= '' and lock and not seconds and redis.call('GET', lock) == id then -- asynq's client stored it
        seconds = redis.call('TTL', lock)
        redis.call('HSET', key, 'sluice_lock', seconds)
      end
      if seconds then keep_lock(lock, id, to - now + seconds) end
      if mark ~= '' then
        redis.call('HSET', key, 'sluice_join', mark)
        lines[ARGV[i + 4]] = true
      end
      if message ~= '' and redis.call('HSTRLEN', key, 'msg') == tonumber(ARGV[i + 6]) then
        redis.call('HSET', key, 'msg', message)
      end
    elseif group and group ~= '' then
      redis.call('ZADD', ARGV[2] .. group, now, id)
      redis.call('HSET', key, 'state', 'aggregating')
    else
      pending[#pending + 1] = id
      redis.call('HSET', key, 'state', 'pending', 'pending_since', ARGV[4])
      if seconds and redis.call('GET', lock) == id then redis.call('EXPIRE', lock, seconds) end
    end
  end
  reply[#reply + 1] = (waits or mark ~= '' and join == mark) and 1 or 0
end
if #moved > 0 then redis.call('ZREM', KEYS[1], unpack(moved)) end
if #pending > 0 then redis.call('LPUSH', KEYS[3], unpack(pending)) end
if #scores > 0 then redis.call('ZADD', KEYS[2], unpack(scores)) end
for line in pairs(lines) do join_line(KEYS[4], line) end
return reply
