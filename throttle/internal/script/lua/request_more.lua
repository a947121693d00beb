-- request_more.lua: shared by verbs and lines, for requests that are not simply granted; a part of extras(call).
--
--   resumed(r, list, at) -> list, at           the scopes as they will be when the operators' pause of the
--                                              request ends, and that time
--   too_late(r, expected, latest, earliest) -> status
--                                              that refuses a request which would wait too long, or nil
--   line_of(r) -> J                            the functions of line_join.lua, set up once; it reads the
--                                              request's line part, if there is a request
--   denied(r, list, now, fits, time) -> status, at, expected, latest, binds
--                                              the answer to a denied request without a ticket
--   fields(r, list, now, fits, time, latest, binds, nudge) -> text
--                                              the fields of the answer; fits: false without windows. The
--                                              upstream's verbs, with r.scopes, get no pause by operators

local SOON = 100000 -- us in which tickets that wait for slots may leave

local function resumed(r, list, at)
  if not r.paused then return list, at end
  return scopes.later(r.unlimited and {} or list, r.paused), r.paused
end

local function too_late(r, expected, latest, earliest)
  local now = call.now
  -- Without a latest start the wait counts as at most 2 us, or up to the pause's end: a max_wait below that refuses r.
  local wait = latest > 0 and latest - now or max(min(expected - now, 2), (r.paused or now) - now)
  if r.max_wait and wait > r.max_wait then return 4 end
  if r.deadline and earliest - now > r.deadline then return 7 end
end

local function line_of(r)
  if not call.line then
    local files = made_once(line_files, call)
    call.line = files.new_join(files.new_line(call))
  end
  if r then read_line_part(r) end
  return call.line
end

local function denied(r, list, now, fits, time)
  if r.paused then
    list, now = resumed(r, list, now)
    time = windows.fits_at(list, r.costs, now, {})
  end
  local latest, binds, earliest = time, 0, now
  if call.line then
    time, latest, binds, earliest = call.line.expect(r, list, now, fits)
    -- Every window has room, but others wait for slots: nobody knows for how long.
    if time <= now and not r.paused then time, latest = now + SOON, 0 end
  else
    local longest = now
    for i = 1, list[1] and #call.windows or 0 do
      if fits[i] > longest then longest, binds = fits[i], i end
      if not call.windows[i].algorithm.release then
        earliest = max(earliest, fits[i])
      elseif fits[i] > now and list[call.scope_of[i]].states[i].hold == 0 then
        latest = 0 -- nobody knows how long slots are held
      end
    end
  end
  return too_late(r, time, latest, min(earliest, time)) or 0, call.now, time, latest, binds
end

local function fields(r, list, now, fits, time, latest, binds, nudge)
  local reply = {time = time, latest = latest or time, fits = fits or nil, old_costs = r.old_costs}
  if binds ~= 0 then reply.binds = binds end
  if nudge == 1 then reply.nudge = true end
  if now > call.now then reply.behind = now - call.now end
  for i = 1, fits and #call.windows or 0 do fits[i] = fits[i] or 0 end
  for s = 1, #list do
    if list[s].sections then upstream().add_reply(list[s], now, reply) end
  end
  if r.paused and not r.scopes and (r.unlimited or not reply.pause or r.paused > reply.pause.ends) then
    reply.pause = {ends = r.paused, whose = r.whose}
  end
  local p = reply.pause
  -- If the wait goes on after a pause by operators, the longer part binds: the pause, or the rest.
  if p and (time <= p.ends or p.whose and time - p.ends <= p.ends - call.now) then reply.binds = -2 end
  return write_fields(reply)
end
