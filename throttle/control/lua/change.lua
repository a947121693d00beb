-- change.lua: makes one change of what is in force, and logs it.
--
-- KEYS  1 the state, a hash   2 the log, a stream
-- ARGV  1 field      "policies", "override POLICY TENANT" or "pause POLICY TENANT", escaped;
--                    empty: the change is only logged
--       2 value      JSON, or empty: the field is deleted
--       3 ttl        of an override or a pause (us)
--       4 version    of policies: the one that this replaces
--       5 most       overrides and pauses that may be in force
--       6 entry      JSON, for the log
--       7 kept       entries of the log
-- reply status, version
--       status   1 done   2 conflict: policies have another version, which follows   3 nothing to
--                delete   4 too many are in force
--
-- The state has these fields: version (of every change), policies_version (the version that published
-- policies got), mark (the ID of the last change in the log, as Redis may lose the state and begin anew),
-- and those of ARGV[1]. An override and a pause are "UNTIL JSON" (us).

local field, value = ARGV[1], ARGV[2]
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local state = redis.call('HGETALL', KEYS[1])
local known, count, ended = {}, 0, {}
for i = 1, #state, 2 do
  local name, text = state[i], state[i + 1]
  known[name] = text
  if string.find(name, ' ', 1, true) then
    if tonumber(string.match(text, '^%d+')) > now then
      count = count + 1
    else
      ended[#ended + 1] = name
      known[name] = nil
    end
  end
end
local version, published = known.version or 0, tonumber(known.policies_version or 0)
if field == 'policies' and published ~= tonumber(ARGV[4]) then return {2, published} end
if field ~= '' and value == '' and not known[field] then return {3, 0} end
if value ~= '' and field ~= 'policies' and not known[field] and count >= tonumber(ARGV[5]) then
  return {4, count}
end

version = string.format('%d', version + 1)
for i = 1, #ended, 1000 do
  redis.call('HDEL', KEYS[1], unpack(ended, i, math.min(#ended, i + 999)))
end
local mark = redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[7], '*', 'change', ARGV[6], 'version', version)
redis.call('HSET', KEYS[1], 'version', version, 'mark', mark)
if field == 'policies' then
  redis.call('HSET', KEYS[1], 'policies', value, 'policies_version', version)
elseif value ~= '' then
  redis.call('HSET', KEYS[1], field, string.format('%d ', now + ARGV[3]) .. value)
elseif field ~= '' then
  redis.call('HDEL', KEYS[1], field)
end
return {1, tonumber(version)}
