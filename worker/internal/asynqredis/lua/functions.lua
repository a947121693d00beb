-- functions.lua: functions of the scripts. They are put in front of each script but batch_count.

-- keep_lock makes a unique task's lock last for at least so many seconds from now, even if it had expired; with
-- `exactly`, for just as many. It does nothing without a lock or seconds, or if another task has the lock.
local function keep_lock(lock, id, seconds, exactly)
  if not lock or not seconds then return end
  seconds = math.max(1, tonumber(seconds))
  if redis.call('SET', lock, id, 'NX', 'EX', seconds) or redis.call('GET', lock) ~= id then return end
  if exactly or redis.call('TTL', lock) < seconds then redis.call('EXPIRE', lock, seconds) end
end

-- keep_waiting keeps a unique task's lock for `wait` seconds, while the task waits, and then for `seconds`, the lock's
-- own time. If asynq's client stored the task, `seconds` are what is left of that time at the first wait.
local function keep_waiting(key, lock, id, seconds, wait)
  if lock and not seconds and redis.call('GET', lock) == id then
    seconds = redis.call('TTL', lock)
    redis.call('HSET', key, 'sluice_lock', seconds)
  end
  if seconds then keep_lock(lock, id, seconds + wait) end
end

-- set_aside sets aside a task that was taken from its queue, until somebody moves it.
local function set_aside(scheduled, key, id, lock, time)
  redis.call('HSET', key, 'state', 'scheduled', 'sluice_join', 'set_aside')
  redis.call('ZADD', scheduled, time + 10 * 366 * 86400, id)
  keep_lock(lock, id, 366 * 86400)
end

-- delete_task deletes a task, and the lock that it holds.
local function delete_task(key, id, lock)
  redis.call('DEL', key)
  if lock and redis.call('GET', lock) == id then redis.call('DEL', lock) end
end

-- join_line adds a line to the list of the lines in which tasks of a queue wait: see dequeue.lua.
local function join_line(lines, line)
  if redis.call('ZADD', lines, 'NX', '0', line) == 1 then redis.call('PEXPIRE', lines, 86400000) end
end

-- is_stopped reports whether a task must not start: its firing is paused, cancelled or outside its hours.
local firings = {} -- by name: the answer, the same for all tasks of one call
local function is_stopped(prefix, id)
  local name = string.byte(id) == 115 and string.match(id, '^sluice%-batch:(.+):%d+$') -- "s"
  if name and firings[name] == nil then
    local key = string.sub(prefix, 1, -3) .. 'sluice:batch:' .. name -- without its "t:" the prefix is the queue's
    local want, closes = unpack(redis.call('HMGET', key, 'want', 'closes'))
    local has_hours = closes and closes ~= '0'
    local is_closed = has_hours and tonumber(redis.call('TIME')[1]) >= tonumber(closes)
    firings[name] = want == 'pause' or want == 'cancel' or is_closed
  end
  return name and firings[name]
end
