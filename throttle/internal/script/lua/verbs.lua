-- verbs.lua: the verbs that few calls use.
--
-- Key, behind the prefix P of the policy:
--   n:ID/AT   the fate of a reservation that was granted at AT, as fields:
--               cancelled, released   1 at the end
--               settled               its cost since the last correction: "WINDOW=UNITS,..."
--               added                 the units that corrections added, less those given back:
--                                     "TIME/WINDOW=UNITS,...;..."
-- Most reservations never have that key. The id of an idempotency key may be granted again later. If
-- that is at the same time, as the clock was set back, its earlier fate is forgotten.
--
-- new_verbs(call) returns the verbs by their names. verb(op) returns one of them.
-- replace(r, list, now) gives back the grant that a reserve replaces.

local function new_verbs(call)
  local ADDED = 16   -- corrections of one reservation whose times are known
  local KEPT = 60000 -- ms for which the key is kept, at least
  local verbs = {}

  function verbs.exempt(r, list, now, fits)
    local status, at = granted_before(call, r)
    if status then return status, at end
    grant(call, r, list, now)
    if call.line and r.ticket then call.line.remove(r.ticket) end
    return 1, now
  end

  function verbs.observe(r, list, now, fits)
    local time = windows.fits_at(call, list, r.costs, now, fits)
    local status, at = verbs.exempt(r, list, now, fits)
    if status ~= 1 or time <= now then return status, at end
    return status, at, time
  end

  function verbs.peek(r, list, now, fits)
    local time, line = windows.fits_at(call, list, r.costs, now, fits), call.line
    if time > now or r.paused or line and line.somebody_waits(r, r.ticket) then
      return denied(call, r, list, now, fits, time)
    end
    return 1, now, now -- the answer also has what the upstream said
  end

  function verbs.leave(r, list, now)
    if not call.line or not call.line.remove(r.ticket) then return 8, now end
    call.dirty = true
    return 1, now
  end

  function verbs.refresh(r, list, now)
    if not call.line then return 8, now end
    call.line.refresh(r)
    return 1, now
  end

  function verbs.expect(r, list, now, fits)
    local low, high, binds
    if call.line and r.flow then low, high, binds = call.line.stands(r, list, now, fits) end
    if low then return 6, call.now, low, high, binds end
    return 8, call.now, windows.fits_at(call, list, r.costs, now, fits)
  end

  -- upstream_verb says something of the scopes that the request names. The status is 8 if none of
  -- them learns anything.
  local function upstream_verb(says)
    return function(r, list, now, fits)
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

  local function state_key(r) return call.P .. 'n:' .. r.id .. format('/%d', r.at) end

  local function read_units(text)
    local units = {}
    for window, n in gmatch(text or '', '([^=,]+)=(%d+)') do units[window] = n + 0 end
    return units
  end

  local function units_text(units, least)
    local parts = {}
    for window, n in pairs(units) do
      if n >= least then parts[#parts + 1] = format('%s=%d', window, n) end
    end
    return concat(parts, ',')
  end

  -- read_state reads the key into r.state, r.cancelled, r.added and r.settled.
  local function read_state(r)
    local state = read_fields(redis.call('GET', state_key(r)) or '', {})
    r.state, r.cancelled, r.added, r.settled = state, state.cancelled, {}, read_units(state.settled)
    for at, units in gmatch(state.added or '', '(%d+)/([^;]*);') do
      r.added[#r.added + 1] = {at = at + 0, units = read_units(units)}
    end
  end

  -- cost_of returns its cost now in a window. The caller may know an earlier cost.
  local function cost_of(r, i) return r.settled[call.windows[i].name] or r.costs[i] end

  -- note_before sets r.before, before a correction.
  local function note_before(r)
    if not next(r.settled) then return end
    local costs = {}
    for i = 1, #call.windows do costs[i] = format('%d', cost_of(r, i)) end
    r.before = concat(costs, ',')
  end

  -- added_text returns the corrections that added units. Of many, the oldest count as one from the time
  -- of the first. Units that a window has forgotten by then are not given back.
  local function added_text(r)
    local parts = {}
    while #r.added > ADDED do
      local second = table.remove(r.added, 2)
      local units = r.added[1].units
      for window, n in pairs(second.units) do units[window] = (units[window] or 0) + n end
    end
    for _, added in ipairs(r.added) do
      local units = units_text(added.units, 1)
      if units ~= '' then parts[#parts + 1] = format('%d/%s;', added.at, units) end
    end
    return concat(parts)
  end

  -- give_back gives back units of a window, the last added ones first. It returns
  -- how many still counted.
  local function give_back(r, scope, i, now, units)
    local window, st, given = call.windows[i], scope.states[i], 0
    local id = lease_id(call, r)
    for k = #r.added, 1, -1 do
      local added = r.added[k]
      local part = min(units, added.units[window.name] or 0)
      if part > 0 then
        added.units[window.name], units = added.units[window.name] - part, units - part
        if added.at <= now then
          given = given + window.algorithm.give_back(st, now, added.at, part, id)
        end
      end
    end
    -- A lease holds the cost before settlements. A grant that is later than now, from before a
    -- clock was set back, is in no state any more.
    if (units > 0 or window.algorithm.release) and r.at <= now then
      given = given + window.algorithm.give_back(st, now, r.at, units, id)
    end
    return given
  end

  -- each calls do(scope, i) for every window of the scopes.
  local function each(list, act)
    for _, scope in ipairs(list) do
      for _, i in ipairs(scope.of.windows) do act(scope, i) end
    end
  end

  -- each_lease is `each` for the windows that hold their grants.
  local function each_lease(list, now, act)
    each(list, function(scope, i)
      local algorithm = call.windows[i].algorithm
      if not algorithm.release then return end
      scopes.touch(scope, now)
      act(algorithm, scope.states[i], i, scope)
    end)
  end

  -- until_all tells when nothing of the costs, or of the changes, is counted any more.
  local function until_all(list, now, costs, changes)
    local time = now
    each(list, function(scope, i)
      if costs[i] ~= 0 or changes and changes[i] ~= 0 then
        time = max(time, call.windows[i].algorithm.resets_at(scope.states[i], now))
      end
    end)
    return time
  end

  -- remember writes the key, until the time at which nothing of the reservation counts.
  local function remember(r, state, time)
    local ms = format('%d', max(ceil((time - call.now) / 1000), KEPT))
    redis.call('SET', state_key(r), write_fields(state), 'PX', ms)
    call.dirty = true
  end

  function verbs.cancel(r, list, now, fits)
    if r.lost then
      call.dirty = true -- a late copy of the call that was lost does nothing
      local known, place = r.known or '', 8 * r.lost
      if byte(known, place) ~= 1 or unpack7(known, 1) ~= r.lost_seq then return 8, now end
      r.at = unpack7(known, place + 1)
    end
    read_state(r)
    if r.cancelled then return 8, now, now end
    note_before(r)
    local costs, given = {}, 0
    for i = 1, #call.windows do costs[i] = cost_of(r, i) end
    for i in gmatch(r.never or '', '%d+') do costs[i + 0] = 0 end
    local time = until_all(list, now, r.costs, costs)
    each(list, function(scope, i)
      scopes.touch(scope, now)
      local before = scope.states[i].used
      fits[i] = give_back(r, scope, i, now, costs[i])
      given = given + before - scope.states[i].used
    end)
    remember(r, {cancelled = 1}, time)
    local once_key = r.once and call.P .. 'n:' .. r.once
    if once_key and match(redis.call('GET', once_key) or '', '^%d+') == format('%d', r.at) then
      redis.call('DEL', once_key) -- else the idempotency key was granted again
    end
    if call.line and r.flow then call.line.take_back(r) end
    look_again(call, r)
    return given > 0 and 1 or 8, now, now
  end

  -- A put-back that comes again gives nothing back: the ticket may have been taken since, and others
  -- may have got its units.
  function verbs.put_back(r, list, now, fits)
    local line = line_of(call, r)
    local _, _, rank = line.ticket(r.ticket)
    if rank and rank + 0 == r.rank then return 8, now end -- it was put back
    verbs.cancel(r, list, now, fits)
    if r.cancelled then return 8, now end
    if not rank then line.join(r, list, now) end -- else it joined again, and stays there
    return 1, now
  end

  function verbs.release(r, list, now)
    read_state(r)
    local state, time, freed = r.state, now, false
    if next(r.settled) then time = until_all(list, now, r.costs) end
    each_lease(list, now, function(algorithm, st, i)
      if algorithm.release(st, now, r.at, r.costs[i], lease_id(call, r)) > 0 then
        freed = true
        time = max(time, now + st.lease) -- a renewal may still be on its way
      end
    end)
    if not freed then return 8, now end
    state.released = 1
    if not r.cancelled then remember(r, state, time) end
    look_again(call, r)
    return 1, now
  end

  -- A lease that has run out is renewed only where nobody waits: the slot is theirs.
  function verbs.renew(r, list, now)
    local status = 1
    read_state(r)
    each_lease(list, now, function(algorithm, st, i, scope)
      if r.costs[i] == 0 then return end
      local id, waits = lease_id(call, r), call.line and call.line.waits_at(scope.suffix)
      if r.cancelled or r.state.released or algorithm.renew(st, now, r.costs[i], id, waits) == 0 then
        status = 8
      end
    end)
    call.dirty = true
    return status, now
  end

  function verbs.settle(r, list, now, fits)
    read_state(r)
    if r.cancelled then return 8, now end
    note_before(r)
    local adds, changes, changed = {at = now, units = {}}, {}, false
    for cost in gmatch(r.actual, '-?%d+') do
      local i = #changes + 1
      cost = cost + 0
      changes[i] = cost >= 0 and cost - cost_of(r, i) or 0
      changed = changed or changes[i] ~= 0
      if cost >= 0 then r.settled[call.windows[i].name] = cost end
    end
    if not changed then return 8, now end
    -- Units that are given back count as long for a caller who does not know.
    local time = until_all(list, now, r.costs)
    each(list, function(scope, i)
      local window, change = call.windows[i], changes[i]
      scopes.touch(scope, now)
      if change > 0 then
        window.algorithm.take(scope.states[i], now, change, 0, lease_id(call, r))
        adds.units[window.name] = change
      elseif change < 0 then
        give_back(r, scope, i, now, -change)
      end
    end)
    r.added[#r.added + 1] = adds
    local state = {released = r.state.released, settled = units_text(r.settled, 0), added = added_text(r)}
    remember(r, state, max(time, until_all(list, now, r.costs, changes)))
    -- Also after units were added: the first flow may have to wait here now, and hold up nobody
    -- elsewhere.
    look_again(call, r)
    return 1, now
  end

  return verbs
end

local function verb(op) return once(new_verbs, call)[op] end

-- replace gives back the grant of r.at. A late cancel, or another such request, gives back
-- nothing.
local function replace(r, list, now)
  local replaced = {id = r.replaces, at = r.at, costs = r.costs, suffixes = r.suffixes, place = ''}
  verb('cancel')(replaced, list, now, {})
end
