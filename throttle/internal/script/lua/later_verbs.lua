-- later_verbs.lua: the verbs that few calls use, and that are not about a reservation.
--
-- later_verbs(call) returns a table of
--   exempt, observe, peek       reserve without a denial, also told about, and without a change
--   leave, refresh, expect      tickets and flows of a line
--   pause, resume, remaining    what the upstream said

local function later_verbs(call)
  local verbs = {}

  function verbs.exempt(r, list, now, fits, before)
    local status, at = granted_before(call, r, before)
    if status then return status, at end
    grant(call, r, list, now)
    if call.line and r.ticket then call.line.seldom().remove(r.ticket) end
    return 1, now
  end

  function verbs.observe(r, list, now, fits, before)
    local time = windows.fits_at(call, list, r.costs, now, fits)
    local status, at = verbs.exempt(r, list, now, fits, before)
    if status ~= 1 or time <= now then return status, at end
    return status, at, time
  end

  function verbs.peek(r, list, now, fits)
    local time, line = windows.fits_at(call, list, r.costs, now, fits), call.line
    read_place(r)
    if time > now or r.paused or line and line.seldom().somebody_waits(r, r.ticket) then
      return denied(call, r, list, now, fits, time)
    end
    for s = 1, #list do -- the answer also has what the upstream said
      if list[s].upstream then return 1, now, now end
    end
    return 1, now
  end

  function verbs.leave(r, list, now)
    if not call.line or not call.line.seldom().remove(r.ticket) then return 8, now end
    call.dirty = true
    return 1, now
  end

  function verbs.refresh(r, list, now)
    if not call.line then return 8, now end
    read_place(r)
    call.line.seldom().refresh(r)
    return 1, now
  end

  function verbs.expect(r, list, now, fits)
    read_place(r)
    local low, high, binds
    if call.line and r.flow then low, high, binds = call.line.seldom().stands(r, list, now, fits) end
    if low then return 6, call.now, low, high, binds end
    return 8, call.now, windows.fits_at(call, list, r.costs, now, fits)
  end

  -- upstream_verb says something of the scopes that the request names. The status is 8 if none of
  -- them learns anything.
  local function upstream_verb(says)
    return function(r, list, now, fits, before)
      if before == 1 then return 1, r.done_at end
      local status = 8
      for place in gmatch(r.scopes, '%d+') do
        local scope = list[place + 0]
        scopes.touch(scope, now)
        if upstream()[says](scope, now, r) ~= false then status = 1 end
      end
      call.dirty = true
      look_again(call, r)
      return status, now, now
    end
  end

  verbs.pause = upstream_verb('pause')
  verbs.resume = upstream_verb('resume')
  verbs.remaining = upstream_verb('remaining')
  return verbs
end
