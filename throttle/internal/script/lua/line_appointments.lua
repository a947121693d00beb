-- line_appointments.lua: when servers ask a line next.
--
-- A server that gets less than it could run is told when to ask again. Of a queue's record, `first`
-- and `last` are the first and the last such time that servers will keep. Idle servers would all
-- ask when the next ticket fits: their appointments are SPACING apart.
--
-- appointments is a table of
--   nudge(q, now, time) -> 1 or 0           whether a server has to be woken for a ticket that is
--                                           expected to start at `time`
--   next(q, now, time, own) -> time         when a server shall ask again if the next ticket may
--                                           fit at `time`; own: its last appointment
--   latest(now) -> time                     when a server asks again if no such time is known

local appointments
do
local max, min = math.max, math.min

local SPACING = 5000    -- us between appointments
local FORGET = 10000    -- us after which an appointment that was not kept is forgotten
local LATEST = 1000000  -- us until the latest appointment

appointments = {
  -- No server is woken if one asks by then.
  nudge = function(q, now, time)
    local kept = q.last >= now - FORGET and not (q.first < now - FORGET and q.asked < q.first)
    if kept and q.first <= max(time, now) + SPACING then return 0 end
    local at = now
    if q.claims then at = min(max(time, now), now + LATEST) end -- their process asks in time
    -- One server wakes: the next tickets need not wake others.
    q.first, q.last, q.changed = at, at, true
    return 1
  end,

  next = function(q, now, time, own)
    if time <= now then return now end
    if q.last < now - FORGET or q.last == own or time < q.first then
      q.first, q.last = time, time
    else
      local last = q.last
      q.last = max(time, last + SPACING)
      if q.last > last + SPACING then q.first = q.last end
    end
    if q.last > now + LATEST then
      q.last = now + LATEST
      q.first = min(q.first, q.last)
    end
    q.changed = true
    return q.last
  end,

  latest = function(now) return now + LATEST end,
}
end
