-- reservation.lua: the verbs about a reservation: put_back, cancel, release, renew, settle.
--
-- Key, behind the prefix P of the policy:
--   n:ID   what became of a reservation: "AT", when it was granted, and, by blanks,
--            =WINDOW=UNITS,...        what it costs since the last correction
--            +TIME:WINDOW=UNITS,...   what a correction added, and what is not given back of it
--            again                    the id of an idempotency key was granted once more, at AT
--            cancelled, released      at the end
-- Most reservations never have that key. One made by an idempotency key may be granted again later.
-- What became of it before is then forgotten, and the earlier grant counts as cancelled.
--
-- reservation_verbs(call) returns them.

local reservation_verbs = once(function(call)
  local verbs = {}
  windows.complete(call)
  local CANCELLED, RELEASED, AGAIN = ' cancelled', ' released', ' again'
  local ADDED = 16   -- corrections of one reservation whose times are known
  local KEPT = 60000 -- ms for which the key is kept, at least

  local function state_key(r) return call.P .. 'n:' .. r.id end

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

  -- read_state reads the key into r.again, r.cancelled, r.released, r.added and r.settled, and
  -- returns its text, false if it says nothing of this grant.
  local function read_state(r)
    local state = redis.call('GET', state_key(r))
    local of = state and tonumber(match(state, '^%d+'))
    r.again = state and find(state, AGAIN, 1, true) and AGAIN or ''
    if of and of < r.at and r.again == '' then state = false end
    r.cancelled = state and (of ~= r.at or find(state, CANCELLED, 1, true))
    r.released = state and sub(state, -#RELEASED) == RELEASED
    r.added, r.settled = {}, read_units(state and match(state, ' =(%S+)'))
    for at, units in gmatch(state or '', ' %+(%d+):(%S+)') do
      r.added[#r.added + 1] = {at = at + 0, units = read_units(units)}
    end
    return state
  end

  -- cost_of returns what it costs now in a window. The caller may know an earlier cost.
  local function cost_of(r, i) return r.settled[call.windows[i].name] or r.costs[i] end

  -- note_before sets r.before, before a correction.
  local function note_before(r)
    if not next(r.settled) then return end
    local costs = {}
    for i = 1, #call.windows do costs[i] = format('%d', cost_of(r, i)) end
    r.before = concat(costs, ',')
  end

  -- added_text returns what corrections added, for the key. Of many, the oldest count as one from
  -- the time of the first. What a window has forgotten by then is not given back.
  local function added_text(r)
    local parts = {}
    while #r.added > ADDED do
      local second = table.remove(r.added, 2)
      local units = r.added[1].units
      for window, n in pairs(second.units) do units[window] = (units[window] or 0) + n end
    end
    for _, added in ipairs(r.added) do
      local units = units_text(added.units, 1)
      if units ~= '' then parts[#parts + 1] = format(' +%d:', added.at) .. units end
    end
    return concat(parts)
  end

  -- give_back gives back units of a window, those first that a correction added last. It returns
  -- how many still counted.
  local function give_back(r, scope, i, now, units)
    local window, st, given = call.windows[i], scope.states[i], 0
    local id = requests.lease_id(call, r)
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
    -- What a lease holds is not what was settled since. What was granted later than now, before a
    -- clock was set back, is in no state any more.
    if (units > 0 or window.algorithm.release) and r.at <= now then
      given = given + window.algorithm.give_back(st, now, r.at, units, id)
    end
    return given
  end

  -- until_all tells when nothing of the costs, or of the changes, is counted any more.
  local function until_all(list, now, costs, changes)
    local time = now
    for _, scope in ipairs(list) do
      for _, i in ipairs(scope.of.windows) do
        if costs[i] ~= 0 or changes and changes[i] ~= 0 then
          time = max(time, call.windows[i].algorithm.resets_at(scope.states[i], now))
        end
      end
    end
    return time
  end

  -- remember writes the key, until the time at which nothing of the reservation counts.
  local function remember(r, value, time)
    local ms = format('%d', max(ceil((time - call.now) / 1000), KEPT))
    redis.call('SET', state_key(r), value, 'PX', ms)
    call.dirty = true
  end

  -- A put-back that comes again gives nothing back: the ticket may have been taken since, and others
  -- may have been granted what it had.
  function verbs.put_back(r, list, now, fits, before)
    if before == 1 then return 1, r.done_at end
    local line = requests.line(call)
    requests.read_place(r)
    read_state(r)
    local rank = line.rank(r.ticket)
    if r.cancelled or rank == r.rank then return 8, now end -- it was put back
    if rank then -- it joined again, and stays there
      verbs.cancel(r, list, now, fits, before)
      return 1, now
    end
    local time = until_all(list, now, r.costs)
    windows.give_back(call, list, r.costs, now, r.at, requests.lease_id(call, r))
    remember(r, format('%d', r.at) .. r.again .. CANCELLED, time)
    line.take_back(r)
    line.join(r, list, now)
    line.untook(r)
    requests.look_again(call, r)
    return 1, now
  end

  function verbs.cancel(r, list, now, fits, before)
    if before == 1 then return 1, r.done_at end
    read_state(r)
    if r.cancelled then return 8, now, now end
    note_before(r)
    local costs = {}
    for i = 1, #call.windows do costs[i] = cost_of(r, i) end
    for i in gmatch(r.word or '', '%d+') do costs[i + 0] = 0 end
    local time = until_all(list, now, r.costs, costs)
    for _, scope in ipairs(list) do
      scopes.touch(scope, now)
      for _, i in ipairs(scope.of.windows) do fits[i] = give_back(r, scope, i, now, costs[i]) end
    end
    remember(r, format('%d', r.at) .. r.again .. CANCELLED, time)
    if r.once then redis.call('DEL', call.P .. 'n:' .. r.once) end
    if call.line then
      requests.read_place(r)
      if r.flow then call.line.take_back(r) end
    end
    requests.look_again(call, r)
    return 1, now, now
  end

  function verbs.release(r, list, now)
    local state, time, freed = read_state(r), now, false
    if state and find(state, ' ', 1, true) then time = until_all(list, now, r.costs) end
    for _, scope in ipairs(list) do
      for _, i in ipairs(scope.of.windows) do
        local algorithm, st = call.windows[i].algorithm, scope.states[i]
        if algorithm.release then
          scopes.touch(scope, now)
          if algorithm.release(st, now, r.at, r.costs[i], requests.lease_id(call, r)) > 0 then
            freed = true
            time = max(time, now + st.lease) -- a renewal may still be on its way
          end
        end
      end
    end
    if not freed then return 8, now end
    if not r.cancelled then remember(r, (state or format('%d', r.at)) .. RELEASED, time) end
    requests.look_again(call, r)
    return 1, now
  end

  function verbs.renew(r, list, now)
    local status = 1
    read_state(r)
    for _, scope in ipairs(list) do
      for _, i in ipairs(scope.of.windows) do
        local algorithm, cost = call.windows[i].algorithm, r.costs[i]
        if algorithm.renew and cost > 0 then
          scopes.touch(scope, now)
          if r.cancelled or r.released or
            algorithm.renew(scope.states[i], now, cost, requests.lease_id(call, r)) == 0 then
            status = 8
          end
        end
      end
    end
    call.dirty = true
    return status, now
  end

  function verbs.settle(r, list, now, fits, before)
    if before == 1 then return 1, r.done_at end
    read_state(r)
    if r.cancelled then return 8, now end
    note_before(r)
    local adds, changes, changed = {at = now, units = {}}, {}, false
    for cost in gmatch(r.word, '[^,]+') do
      local i = #changes + 1
      changes[i] = cost ~= '-' and cost - cost_of(r, i) or 0
      changed = changed or changes[i] ~= 0
      if cost ~= '-' then r.settled[call.windows[i].name] = cost + 0 end
    end
    if not changed then return 8, now end
    -- What is given back counts as long for a caller who does not know.
    local time = until_all(list, now, r.costs)
    for _, scope in ipairs(list) do
      scopes.touch(scope, now)
      for _, i in ipairs(scope.of.windows) do
        local window, change = call.windows[i], changes[i]
        if change > 0 then
          window.algorithm.take(scope.states[i], now, change, 0, requests.lease_id(call, r))
          adds.units[window.name] = change
        elseif change < 0 then
          give_back(r, scope, i, now, -change)
        end
      end
    end
    r.added[#r.added + 1] = adds
    local value = format('%d', r.at) .. r.again .. ' =' .. units_text(r.settled, 0) .. added_text(r)
    if r.released then value = value .. RELEASED end
    remember(r, value, max(time, until_all(list, now, r.costs, changes)))
    -- Also after units were added: the first flow may have to wait here now, and hold up nobody
    -- elsewhere.
    requests.look_again(call, r)
    return 1, now
  end
  return verbs
end)
