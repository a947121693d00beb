-- nudge.lua: for each of these lines, wakes an idle server that is to ask the line. Until a server does so, the
-- line counts as unwatched.
--
-- KEYS  1 names of lines to ask (list), on which idle servers wait  2 lines (dequeue.lua)
-- ARGV  names of lines
-- reply OK

for i = 1, #ARGV do
  redis.call('LREM', KEYS[1], 0, ARGV[i])
  redis.call('RPUSH', KEYS[1], ARGV[i])
  redis.call('ZADD', KEYS[2], '0', ARGV[i])
end
redis.call('PEXPIRE', KEYS[1], 60000)
redis.call('PEXPIRE', KEYS[2], 86400000)
return redis.status_reply('OK')
