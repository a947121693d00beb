-- strict.lua: after a failover it refuses the calls of a policy until no window counts any more
-- what the old primary may have granted last. It begins the scripts of policies that ask for it.
--
-- CLOSED_FOR is the longest that a grant counts (us).
--
-- Keys, behind the prefix of the policy:
--   x   "ID OPEN SET": the replication ID of the primary at the last call, when the policy opens
--       (us, 0: it was never closed), and when this was written (us)
do
  local info = redis.pcall('INFO', 'replication')
  local refused = type(info) == 'table' and info.err
  if refused and not string.match(refused, 'section') then return info end -- miniredis has no such section
  local id = not refused and string.match(info, 'master_replid:(%x+)')
  if id then
    local closed_for = CLOSED_FOR
    local key = string.sub(KEYS[1], 1, -2) .. 'x'
    local time = redis.call('TIME')
    local now = time[1] * 1000000 + time[2]
    local known, open, set = string.match(redis.call('GET', key) or '', '(%x+) (%d+) (%d+)')
    open, set = (open or 0) + 0, (set or 0) + 0
    if known and known ~= id then open = now + closed_for end
    if known ~= id or now - set > closed_for / 2 or now < set then
      redis.call('SET', key, string.format('%s %.0f %.0f', id, open, now),
        'PX', string.format('%.0f', 2 * closed_for / 1000 + 60000))
    end
    if now < open then
      return redis.error_reply(string.format('CLOSED after a failover, for another %.0f ms', (open - now) / 1000))
    end
  end
end
