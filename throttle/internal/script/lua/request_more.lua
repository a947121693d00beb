-- request_more.lua: shared by verbs and lines, for requests that are not simply granted; a part of extras(call).
--
--   resumed(r, list, at) -> list, at: the scopes as they are when the operators' pause of the request ends, and when it
--     does; or both as given without a pause. The list is empty if nothing limits the request then
--   new_answer(time, latest) -> answer: a table of fields of Answer (request.go). time: when a ticket is expected to
--     start; latest: at the latest, 0 if that is unknown
--   refused(r, answer, earliest) -> status: why a request is refused that would wait too long, or nil
--   line_of(r) -> the functions of line_join.lua, set up once. It reads the line part of the request, if there is one
--   denied(r, list, now, fits, time) -> status, at, answer: of a denied request without a ticket
--   fields(r, list, now, fits, answer) -> text: of the answer with all fields. fits: false without windows. The
--     upstream's verbs, with r.scopes, get no pause by operators

local SOON = 100000 -- us in which tickets that wait for slots may leave
local SLOTS, PAUSED = -1, -2 -- `binds` if handler slots do, or a pause

local function resumed(r, list, at)
  if not r.paused then return list, at end
  return scopes.later(r.unlimited and {} or list, r.paused), r.paused
end

local function new_answer(time, latest) -- with the fields that most get, as a table that grows is copied
  return {time = time, latest = latest, binds = nil, nudge = nil, fits = nil, old_costs = nil, pause = nil, left = nil}
end

local function refused(r, answer, earliest)
  local now = call.now
  local wait = answer.latest - now
  if answer.latest == 0 then -- unknown: too long only for the shortest max_wait, 1 us, or by the rest of the pause
    wait = max(min(answer.time - now, 2), (r.paused or now) - now)
  end
  if r.max_wait and wait > r.max_wait then return 'too_long' end
  if r.deadline and earliest - now > r.deadline then return 'too_late' end
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
    time = windows.fits_at(list, r.costs, now, {}) -- by another table: `fits` tells of now, without the pause
  end
  local answer, earliest = new_answer(time, time), now
  if call.line then
    answer, earliest = call.line.expect(r, list, now, fits)
    -- Every window has room, but others wait for slots: nobody knows for how long.
    if answer.time <= now and not r.paused then answer.time, answer.latest = now + SOON, 0 end
  else
    local longest = now
    for i = 1, list[1] and #call.windows or 0 do
      if fits[i] > longest then longest, answer.binds = fits[i], i end
      if not call.windows[i].algorithm.release then
        earliest = max(earliest, fits[i])
      elseif fits[i] > now and list[call.scope_of[i]].states[i].hold == 0 then
        answer.latest = 0 -- nobody knows how long slots are held
      end
    end
  end
  return refused(r, answer, min(earliest, answer.time)) or 'denied', call.now, answer
end

local function fields(r, list, now, fits, answer)
  answer.fits = fits or nil
  answer.latest, answer.old_costs = answer.latest or answer.time, r.old_costs
  if now > call.now then answer.behind = now - call.now end
  for i = 1, fits and #call.windows or 0 do fits[i] = fits[i] or 0 end
  for s = 1, #list do
    if list[s].sections then upstream().add_to_answer(list[s], now, answer) end
  end
  local pause = answer.pause -- the upstream's: without `whose`. It does not hold for unlimited tenants
  if r.paused and not r.scopes and (r.unlimited or not pause or r.paused > pause.ends) then
    pause = {ends = r.paused, whose = r.whose}
    answer.pause = pause
  end
  if pause then
    local during, after = pause.ends - call.now, answer.time - pause.ends -- the wait during the pause, and after it
    -- The upstream's pause and the windows' waits run at the same time: what ends last binds. After
    -- operators' pause a wait is what remains by then: the longer part binds, such as a pause of 60 s before 40 s.
    if after <= 0 or pause.whose and after <= during then answer.binds = PAUSED end
  end
  return write_fields(answer)
end
