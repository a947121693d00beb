-- sliding.lua: no span of `period` ever has more than `limit` units.
-- Source: the sliding window log. It keeps the times of the grants that still count.
--
--   parameters  p1 limit (units), p2 period (us, margin included)
--   payload     used(7) entry*
--   entry       time(7) units(7), oldest first; a time occurs once
--
-- A cut of the limit removes no entry: a limit that is cut and raised again has forgotten nothing.
--
-- A value has at most some 4 kB, whatever the limit. After 192 older entries or, if the limit is higher, 96, a grant
-- joins the newest entry if both are in the same tick: a period has 96 ticks. The entry gets the later time, so a unit
-- counts up to one tick longer, never shorter. If grants merged sooner, a burst in every period would start later each
-- time, by the time between the grants that were merged.
--
-- In the state, `time` and `units` are the newest entry; units: 0 if there is none. Older ones are
-- log.data[log.first .. log.last], a part of the value as it was read, and then log.tail: the entry that was newest
-- before `time` was charged, or ''. Without older ones, log is nil.

do

local EXACT, TICKS, ENTRY = 192, 96, 14 -- entries that are exact, at most; ticks of a period; bytes of an entry

-- flatten moves the tail into the data, so that all older entries are there.
local function flatten(log)
  if log.tail == '' then return end
  log.data = sub(log.data, log.first, log.last) .. log.tail
  log.first, log.last, log.tail = 1, #log.data, ''
end

-- same_tick returns whether a time is in the tick of a later one.
local function same_tick(st, time, later)
  return time >= later - later % floor(st.period / TICKS)
end

algorithms['s'] = {
  load = function(p1, p2, p3, p4, now, data, from, to)
    local st = {limit = p1, period = p2, used = 0, time = 0, units = 0, log = nil}
    if not data then return st end
    local first, last = from + 7, to - ENTRY -- of the entries without the newest one
    if last + 1 < first or (last + 1 - first) % ENTRY ~= 0 then return nil end
    local ended, time = now - p2, unpack7(data, last + 1) -- grants at `ended` or before count no more
    if time <= ended then return st end
    local used = unpack7(data, from)
    while first <= last and unpack7(data, first) <= ended do
      used = used - unpack7(data, first + 7)
      first = first + ENTRY
    end
    st.used, st.time, st.units = used, time, unpack7(data, last + 8)
    if first <= last then st.log = {data = data, first = first, last = last, tail = ''} end
    return st
  end,

  -- In an endless queue, in which the oldest unit that counts is number 1, a unit goes one period after the unit that
  -- is `limit` numbers before it. So steps of `limit` lead back from the cost's last unit to one that counts
  -- already, or has room now. With a limit of 3 in 60 s and grants at 0, 10 and 20 s, the unit after 4 others has
  -- number 8: two steps back is number 2, so it goes two periods after 10 s, at 130 s.
  fits_at = function(st, now, cost, ahead, each)
    local limit, unit, steps = st.limit, st.used + ahead + cost, 0
    if unit <= limit then return now end
    if each > 1 and ahead >= each then -- all tickets ahead cost `each`: a period has room for whole ones only
      local whole, tickets = max(1, floor(limit / each)), floor(ahead / each)
      steps = floor(tickets / whole)
      ahead = (tickets - steps * whole) * each
      unit = st.used + ahead + cost
      if unit <= limit then return now + steps * st.period end
    end
    local more = ceil((ahead + cost) / limit)
    unit, steps = unit - more * limit, steps + more
    if unit <= 0 then return now + (steps - 1) * st.period end -- the unit one step later has room now
    local log, seen = st.log, 0
    if log then
      flatten(log)
      for i = log.first, log.last, ENTRY do
        seen = seen + unpack7(log.data, i + 7)
        if seen >= unit then return unpack7(log.data, i) + steps * st.period end
      end
    end
    return st.time + steps * st.period -- it is in the newest entry
  end,

  charge = function(st, now, cost)
    if cost > MOST - st.used then cost = MOST - st.used end
    if cost == 0 then return end
    local time, units, log = st.time, st.units, st.log
    st.used = st.used + cost
    if units > 0 then
      local merges = time >= now -- a time occurs once
      if log and not merges and same_tick(st, time, now) then
        local exact = st.limit > EXACT and EXACT / 2 or EXACT
        local older_bytes = log.last - log.first + 1 + #log.tail
        merges = older_bytes >= exact * ENTRY
      end
      if merges then
        st.time, st.units = max(time, now), units + cost
        return
      end
      log = log or {data = '', first = 1, last = 0, tail = ''}
      st.log = log
      flatten(log)
      log.tail = pack7(time) .. pack7(units)
    end
    st.time, st.units = now, cost
  end,

  resets_at = function(st, now) return st.units > 0 and st.time + st.period or now end,

  payload = function(st)
    local log, used, newest = st.log, pack7(st.used), pack7(st.time) .. pack7(st.units)
    if not log then return used .. newest end
    return used, sub(log.data, log.first, log.last), log.tail .. newest
  end,

  grants = function(st, at)
    local parts, payload = {}, concat({algorithms['s'].payload(st)})
    for i = 8, #payload, ENTRY do
      local time, units = unpack7(payload, i), unpack7(payload, i + 7)
      if time >= at and units > 0 then parts[#parts + 1] = format('%d/%d,', time, units) end
    end
    return concat(parts)
  end,

  give_back = function(st, now, at, cost)
    if st.units == 0 or at > st.time or at + st.period <= now then return end
    -- The units are in the first entry of `at` or later. It begins at `in_log` in log.data; nil: it is the newest one.
    local log, time, units, in_log = st.log, st.time, st.units, nil
    if log then
      flatten(log)
      local i = log.last + 1
      while i > log.first and unpack7(log.data, i - ENTRY) >= at do i = i - ENTRY end
      if i <= log.last then in_log, time, units = i, unpack7(log.data, i), unpack7(log.data, i + 7) end
    end
    local merged = st.limit > EXACT and same_tick(st, at, time) -- up to that limit grants hardly ever merge
    if time ~= at and not merged then return end -- they count no more
    local back = min(units, cost)
    st.used = st.used - back
    if in_log then
      local left = back < units and pack7(time) .. pack7(units - back) or '' -- of the entry
      log.data = sub(log.data, log.first, in_log - 1) .. left .. sub(log.data, in_log + ENTRY, log.last)
      log.first, log.last = 1, #log.data
    elseif back < units or not log then
      st.units = units - back
    else -- nothing is left of the newest entry: the last one of the log becomes the newest
      log.last = log.last - ENTRY
      st.time, st.units = unpack7(log.data, log.last + 1), unpack7(log.data, log.last + 8)
    end
    if log and log.last < log.first then st.log = nil end
  end,
}
end
