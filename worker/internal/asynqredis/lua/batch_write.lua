-- batch_write.lua: writes fields of a firing, and takes or renews its lease. The holder does the firing's work.
--
-- KEYS  1 the firing (hash)  2 the batch (batch_fire.lua), then the firing's other keys
-- ARGV  1 who writes  2 for how long it takes the lease (ms; 0 gives it back), or "" if it must have it already
--       3 how long the firing is kept (s)  4 name of the firing, then two per field: name, value
--       A value whose name begins with ":" gets its own key. `set_aside` stays 1 while `resumed` is (batch_want.lua)
-- reply what is wanted of the firing: run, pause or cancel; "" if it has ended or is gone, or another has its lease

local writer, lease, kept, batch, time = ARGV[1], ARGV[2], ARGV[3], KEYS[2], redis.call('TIME')
local phase, holder, lease_end = unpack(redis.call('HMGET', KEYS[1], 'phase', 'holder', 'until'))
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if not phase then redis.call('HDEL', batch, ARGV[4]) end -- the firing has expired
if not phase or phase == 'ended' then return '' end
local takes_over = lease ~= '' and (not holder or tonumber(lease_end) <= now)
if holder ~= writer and not takes_over then return '' end
if lease ~= '' then
  redis.call('HSET', KEYS[1], 'holder', writer, 'until', string.format('%.0f', now + lease))
  for i, key in ipairs(KEYS) do
    if i ~= 2 then redis.call('EXPIRE', key, kept) end
  end
end
for i = 5, #ARGV, 2 do
  local name, value = ARGV[i], ARGV[i + 1]
  if value == 'ended' and phase == 'retry' and redis.call('HGET', KEYS[1], 'want') ~= 'cancel' then return 'run' end
  local stays_aside = name == 'set_aside' and value == '0' and redis.call('HGET', KEYS[1], 'resumed') == '1'
  if string.sub(name, 1, 1) == ':' then
    redis.call('SET', KEYS[1] .. name, value, 'EX', kept)
  elseif not stays_aside then
    redis.call('HSET', KEYS[1], name, value)
  end
  if name == 'phase' and value == 'ended' then
    redis.call('HSET', KEYS[1], 'finished', time[1], 'until', 0)
    redis.call('HDEL', batch, ARGV[4])
  end
end
return redis.call('HGET', KEYS[1], 'want') or 'run'
