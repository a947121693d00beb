-- line_appointments.lua: when servers ask a line next.
--
-- A server that gets less than it could run gets a time to ask again. Of a queue's record, `first`
-- and `last` are the first and the last such time that servers will keep. Idle servers would all
-- ask when the next ticket fits: their appointments are SPACING apart.
--
-- Of a queue's record, `since` is the time since which takes left tickets that fit, 0 if the last
-- one did not, and `taken` counts those that were taken since then, in about a minute.

local appointments = {
  SPACING = 7000,   -- us between appointments
  FORGET = 14000,   -- us after which an appointment that was not kept is forgotten
  LATEST = 1000000, -- us until the next server asks, at the latest
  SPREAD = 2000000, -- us until the last of many servers asks
}

-- A queue that no server has asked for is dead after a minute, claims after 2 s.
function appointments.kept(q, now) return now - q.asked < (q.claims and 2000000 or 60000000) end

-- nudge returns 1 if a server has to be woken for a ticket that is expected to start at `time`. None is
-- if one asks by then.
function appointments.nudge(q, now, time)
  if q.claims then return 0 end -- their process, which is alone, asks in time
  local since, spacing = now - appointments.FORGET, appointments.SPACING
  local kept = q.last >= since and not (q.first < since and q.asked < q.first)
  if kept and q.first <= max(time, now) + spacing then return 0 end
  -- One server wakes: the next tickets need not wake others.
  q.first, q.last, q.changed = now, now, true
  return 1
end

-- next returns when a server asks again if the next ticket may fit at `time`; before: its last
-- appointment.
function appointments.next(q, now, time, before)
  if time <= now then return now end
  local spacing, latest = appointments.SPACING, now + appointments.SPREAD
  time = min(time, now + appointments.LATEST)
  if q.last == before or time < q.first then
    q.first, q.last = time, time
  else
    local last = q.last
    q.last = max(time, last + spacing)
    if q.last > last + spacing then q.first = q.last end
  end
  q.last = min(q.last, latest)
  q.changed = true
  return q.last
end

-- took notes that n tickets were taken; full: more fit, and the server had no more slots.
function appointments.took(q, now, n, full)
  if not full then
    q.since, q.taken = 0, 0
  elseif q.since == 0 then
    q.since = now
  else
    q.taken = q.taken + n
    if now - q.since > 60000000 then -- the older half counts no more
      q.since, q.taken = now - 30000000, ceil(q.taken * 30000000 / (now - q.since))
    end
  end
end

-- slot_at returns when a slot is expected for a ticket behind so many of its flow, if slots are what
-- tickets wait for; or 0.
function appointments.slot_at(q, now, flow, position)
  local span = now - q.since
  if q.claims or q.since == 0 or span < 1000000 or q.taken < 10 then return 0 end
  local before = min(q.n, position * q.weights / flow.weight) -- with the shares of others
  return now + floor(before * span / q.taken)
end
