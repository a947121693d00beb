-- lock.lua: a function of the scripts that begin with it.

-- keep_lock has a unique task's lock hold for at least that many seconds more, even if it had run out.
local function keep_lock(lock, id, seconds)
  if not redis.call('SET', lock, id, 'NX', 'EX', seconds) and redis.call('GET', lock) == id
    and redis.call('TTL', lock) < seconds then
    redis.call('EXPIRE', lock, seconds)
  end
end

