-- batch_count.lua: counts tasks of a firing, each once: those that have ended, or were not enqueued.
--
-- KEYS  1 the firing (hash)  2 stored (bitmap)  3 done (bitmap)  4 ended (bitmap)
-- ARGV  1 prefix of the task keys  2 what a task counts as that is gone: done or failed; rejected: not enqueued
--       3 how long the firing is kept (s)  4 how long the task took (us), then the indexes
-- reply per task 1 counted, 0 not

local function add(field, n)
  if redis.call('HINCRBY', KEYS[1], field, n) == 1 then
    redis.call('EXPIRE', KEYS[3], ARGV[3])
    redis.call('EXPIRE', KEYS[4], ARGV[3])
  end
end

local reply = {}
for i = 5, #ARGV do
  local index, counted = ARGV[i], 0
  if ARGV[2] == 'rejected' then
    redis.call('SETBIT', KEYS[2], index, 0) -- it was, until its line refused it
    counted = 1 - redis.call('SETBIT', KEYS[4], index, 1)
    if counted == 1 then add('rejected', 1) end
  elseif redis.call('GETBIT', KEYS[2], index) == 1 and redis.call('GETBIT', KEYS[3], index) == 0 then
    local state = redis.call('HGET', ARGV[1] .. index, 'state')
    local outcome = not state and ARGV[2] or state == 'completed' and 'done' or state == 'archived' and 'failed'
    if outcome then
      local ended = redis.call('SETBIT', KEYS[4], index, 1) == 1
      if outcome == 'done' then
        redis.call('SETBIT', KEYS[3], index, 1)
        add('done', 1)
        redis.call('HINCRBY', KEYS[1], 'took', ARGV[4])
        if ended then add('failed', -1) end -- an operator had it run again
        counted = 1
      elseif not ended then
        add('failed', 1)
        counted = 1
      end
    end
  end
  reply[#reply + 1] = counted
end
return reply
