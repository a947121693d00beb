-- lead.lua: shares the lines of a policy out among workers, so that one of them looks after each.
--
-- KEYS  1 sorted set: line -> end of the lease of whoever leads it (us), even; odd if others have
--         asked for it since: they know something that its leader does not
-- ARGV  1 now: microseconds, or 0 for the clock of Redis
--       2 lease (us)
--       3 how many lines that nobody leads to take over, at the most
--       4.. a line behind a letter: k keeps a lease, a asks for the line, n says that the line is
--         there to who may lead it, r gives the lease back, d says that the line is empty
-- reply the lines that the caller leads from now on, of those it asked for and those taken over,
--       and of those it keeps or says are empty the ones that others have asked for since: all
--       of them to be looked at now

local now = tonumber(ARGV[1])
if now == 0 then
  local t = redis.call('TIME')
  now = tonumber(t[1]) * 1000000 + tonumber(t[2])
end
local ends, led = now + tonumber(ARGV[2]), {}
ends = ends - ends % 2

local function set(line, score) redis.call('ZADD', KEYS[1], string.format('%.0f', score), line) end

local function take(line)
  set(line, ends)
  led[#led + 1] = line
end

for i = 4, #ARGV do
  local what, line = string.sub(ARGV[i], 1, 1), string.sub(ARGV[i], 2)
  local known = what ~= 'r' and tonumber(redis.call('ZSCORE', KEYS[1], line) or '')
  if what == 'r' then
    set(line, now - now % 2)
  elseif what == 'k' or what == 'd' then
    if known and known % 2 == 1 then
      take(line)
    elseif what == 'k' then
      set(line, ends)
    else
      redis.call('ZREM', KEYS[1], line)
    end
  elseif known and known > now then
    set(line, known + 1 - known % 2)
  elseif what == 'a' then
    take(line)
  elseif not known then
    set(line, now - now % 2)
  end
end
for _, line in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now), 'LIMIT', 0, ARGV[3])) do take(line) end
redis.call('EXPIRE', KEYS[1], 604800) -- without a worker for a week, nobody has to know any more
return led
