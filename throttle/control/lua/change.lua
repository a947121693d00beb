-- change.lua: makes one change of what is in force, and logs it.
--
-- KEYS  1 the state, a hash   2 the log, a stream
-- ARGV  1 field      "policies", "override POLICY TENANT" or "pause POLICY TENANT", escaped;
--                    empty: the change is only logged
--       2 value      JSON, or empty: the field is deleted
--       3 ttl        of an override or a pause (us)
--       4 version    of policies: the version that this replaces
--       5 most       overrides and pauses that may be in force
--       6 entry      JSON, for the log: each has an ID of its own
--       7 kept       entries of the log
-- reply status, version; with status 3 how many are in force
--       status   1 done, or with version 0 nothing to delete   2 conflict: policies have another
--                version, which follows   3 too many are in force
--
-- The state has these fields: version (of every change), mark (the ID of the last change in the log, as
-- Redis may lose the state and begin anew), and those of ARGV[1]. Policies are "VERSION JSON", an override
-- and a pause "UNTIL JSON" (us).

-- go-redis may repeat a call whose reply was lost; others may have made changes since.
for _, made in ipairs(redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 10)) do
  if made[2][2] == ARGV[6] then return {1, tonumber(made[2][4])} end
end

local field, value, t = ARGV[1], ARGV[2], redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local state = redis.call('HGETALL', KEYS[1])
local known, count, ended = {}, 0, {}
for i = 1, #state, 2 do
  local name, text = state[i], state[i + 1]
  local ends = string.find(name, ' ', 1, true) and tonumber(string.match(text, '^%d+'))
  if ends and ends <= now then
    ended[#ended + 1] = name
  else
    known[name], count = text, count + (ends and 1 or 0)
  end
end
local version, published = known.version or 0, tonumber(string.match(known.policies or '0', '^%d+'))
if field == 'policies' and published ~= tonumber(ARGV[4]) then return {2, published} end
if field ~= '' and value == '' and not known[field] then return {1, 0} end
if value ~= '' and field ~= 'policies' and not known[field] and count >= tonumber(ARGV[5]) then
  return {3, count}
end

version = string.format('%d', version + 1)
if #ended > 0 then redis.call('HDEL', KEYS[1], unpack(ended)) end -- at most ARGV[5]: unpack can take so many
local mark = redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[7], '*', 'change', ARGV[6], 'version', version)
redis.call('HSET', KEYS[1], 'version', version, 'mark', mark)
if value ~= '' then
  local number = field == 'policies' and version or string.format('%d', now + ARGV[3])
  redis.call('HSET', KEYS[1], field, number .. ' ' .. value)
elseif field ~= '' then
  redis.call('HDEL', KEYS[1], field)
end
return {1, tonumber(version)}
