-- batch_count.lua: counts tasks of a firing that have ended or were not enqueued, each once.
--
-- KEYS  1 the firing (hash)  2 fates of its tasks (string): for each index the first letter of stored, done,
--       failed, rejected or cancelled
-- ARGV  1 prefix of the task keys  2 done or failed: the fate of tasks that are gone; or rejected: counts tasks that
--       were not enqueued  3 how long the task took (us), then the indexes
-- reply per task 1 counted, 0 not

local reply = {}
for i = 4, #ARGV do
  local index, fate = ARGV[i], nil
  local was = string.match(redis.call('GETRANGE', KEYS[2], index, index), '%a') -- the letter of its fate so far, or nil
  if ARGV[2] == 'rejected' then -- a task that was stored may be rejected, too: by its line
    fate = (not was or was == 's') and redis.call('EXISTS', ARGV[1] .. index) == 0 and 'rejected'
  elseif was == 's' or was == 'f' then -- an operator may have run a failed task again
    local state = redis.call('HGET', ARGV[1] .. index, 'state')
    fate = not state and ARGV[2] or state == 'completed' and 'done' or state == 'archived' and 'failed'
  end
  local changes = fate and string.sub(fate, 1, 1) ~= was
  if changes then
    redis.call('SETRANGE', KEYS[2], index, string.sub(fate, 1, 1))
    redis.call('HINCRBY', KEYS[1], fate, 1)
    if was == 'f' then redis.call('HINCRBY', KEYS[1], 'failed', -1) end
    if fate == 'done' then redis.call('HINCRBY', KEYS[1], 'took', ARGV[3]) end
  end
  reply[#reply + 1] = changes and 1 or 0
end
return reply
