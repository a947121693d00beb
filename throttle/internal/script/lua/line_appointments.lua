-- line_appointments.lua: when servers ask a line next.
--
-- A server for which no further ticket fits gets an appointment: a time to ask again. `first` and `last` of a queue's
-- record are the first and the last appointment. Idle servers would all ask when the next ticket fits, so their
-- appointments are SPACING apart.
--
-- `since` of a queue's record is the time since which every take has left tickets that fit, 0 if the last
-- take did not. `taken` is the number of tickets taken since then, about: after a minute the older half is forgotten.

local appointments = {
  SPACING = 7000,   -- us between appointments
  FORGET = 14000,   -- us after which an appointment that was not kept is forgotten
  LATEST = 1000000, -- us until the next server asks, at the latest
  SPREAD = 2000000, -- us until the last of many servers asks
}

-- served returns whether a server still asks for a queue: it did in the last minute, or for claims in 2 s.
function appointments.served(q, now) return now - q.asked < (q.claims and 2000000 or 60000000) end

-- nudge returns whether a server must be woken for a ticket that is expected to start at `time`, as none asks by then.
function appointments.nudge(q, now, time)
  if q.claims then return false end -- their process asks in time
  local since, spacing = now - appointments.FORGET, appointments.SPACING
  local all_past, missed = q.last < since, q.first < since and q.asked < q.first
  if not (all_past or missed) and q.first <= max(time, now) + spacing then return false end
  -- One server wakes, so that the next tickets need not wake others.
  q.first, q.last, q.changed = now, now, true
  return true
end

-- next returns a server's next appointment, if the next ticket may fit at `time`, or from LATEST on, by the first of:
--   first <= time <= previous <= last  another server comes by `time`, and this one keeps its `previous` appointment
--   previous == last, or time < first  it comes at `time`, and the record forgets the others, which come nevertheless
--   otherwise                          it comes SPACING after the last one, but from `time` on, and within SPREAD
function appointments.next(q, now, time, previous)
  if time <= now then return now end
  local spacing = appointments.SPACING
  time = min(time, now + appointments.LATEST)
  if q.first <= time and time <= previous and previous <= q.last then return previous end
  if q.last == previous or time < q.first then
    q.first, q.last = time, time
  else
    local last = q.last
    q.last = min(max(time, last + spacing), now + appointments.SPREAD)
    if q.last > last + spacing then q.first = q.last end -- nobody comes in between, so earlier ones are forgotten
  end
  return q.last -- a queue that is asked for is written in any case
end

-- cover notes in the record of another queue of a server that its next appointment is `at`, instead of `previous`.
function appointments.cover(q, now, at, previous)
  local others_come = q.last > now and q.last ~= previous
  q.first = others_come and q.first > now and min(q.first, at) or at
  q.last = others_come and max(q.last, at) or at
end

-- took notes that n tickets were taken. full: more fit, but the server had no more slots.
function appointments.took(q, now, n, full)
  if not full then
    q.since, q.taken = 0, 0
  elseif q.since == 0 then
    q.since = now
  else
    q.taken = q.taken + n
    if now - q.since > 60000000 then -- the older half is forgotten
      q.since, q.taken = now - 30000000, ceil(q.taken * 30000000 / (now - q.since))
    end
  end
end

-- slot_at returns when a slot is expected for a ticket after `position` others of its flow, or 0 if tickets do not
-- wait for slots, or too little is known.
function appointments.slot_at(q, now, flow, position)
  local span = now - q.since
  if q.claims or q.since == 0 or span < 1000000 or q.taken < 10 then return 0 end
  local ahead = min(q.n, position * q.weights / flow.weight) -- tickets: its own, and others' by their shares
  return now + floor(ahead * span / q.taken)
end
