-- nudge.lua: has one idle server ask the lines of these policies now.
--
-- KEYS  1 names of policies to ask for (list), on which idle servers wait
-- ARGV  names of policies
-- reply OK

for i = 1, #ARGV do
  redis.call('LREM', KEYS[1], 0, ARGV[i])
  redis.call('RPUSH', KEYS[1], ARGV[i])
end
redis.call('PEXPIRE', KEYS[1], 60000)
return redis.status_reply('OK')
