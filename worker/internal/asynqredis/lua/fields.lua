-- fields.lua: returns fields of tasks of one queue.
--
-- KEYS  any key of the queue
-- ARGV  1 prefix of the task keys  2 how many fields: their names follow, and then the IDs
-- reply per task its fields, "" for each that is not there

local names, reply = {}, {}
for i = 3, 2 + ARGV[2] do names[#names + 1] = ARGV[i] end
for i = 3 + ARGV[2], #ARGV do
  local found = redis.call('HMGET', ARGV[1] .. ARGV[i], unpack(names))
  for j = 1, #names do reply[#reply + 1] = found[j] or '' end
end
return reply
