-- verbs.lua: the verbs that few calls use. It is a part of the function extras(call): see library.go.
--
-- Key, after the prefix P of the policy:
--   n:ID      the fate of a reservation, as fields (n:NODE of line.lua has a "|"). Most have none:
--               cancelled, released   true if it was
--               settled               its cost since the last correction, by the names of windows
--               added, added_at       units that corrections added, less those given back; when the first one did
--
-- Added units are given back as if all had been added at the first correction, so that no units of other reservations
-- are given back. Where units of that time count no more, units of later corrections count until they expire.

local function new_verbs(call)
  local verbs = {}

  function verbs.exempt(r, list, now)
    grant(call, r, list, now)
    if call.line and r.ticket then call.line.heads().remove(r.ticket) end
    return 'ok', now
  end

  function verbs.observe(r, list, now, fits)
    local time = windows.fits_at(list, r.costs, now, fits)
    verbs.exempt(r, list, now)
    return 'ok', now, time > now and {time = time} or nil
  end

  function verbs.peek(r, list, now, fits)
    local time, line = windows.fits_at(list, r.costs, now, fits), call.line
    if time > now or r.paused or line and line.somebody_waits(r, r.ticket) then
      return denied(r, list, now, fits, time)
    end
    return 'ok', now, {time = now} -- with an answer, decide.lua also tells the upstream's state
  end

  function verbs.leave(r, list, now)
    if not call.line or not call.line.heads().remove(r.ticket) then return 'nothing', now end
    call.dirty = true
    return 'ok', now
  end

  function verbs.refresh(r, list, now)
    if not call.line then return 'nothing', now end
    call.line.refresh(r)
    return 'ok', now
  end

  function verbs.expect(r, list, now, fits)
    local answer = call.line and r.flow and call.line.expect_ticket(r, list, now, fits)
    if answer then return 'waits', call.now, answer end
    return 'nothing', call.now, {time = windows.fits_at(list, r.costs, now, fits)}
  end

  -- look_again makes the nodes of a request's scopes due, so that a take looks at the flows there.
  local function look_again(r)
    for i = 1, call.line and #r.suffixes or 0 do call.line.heads().look_again(r.suffixes[i]) end
  end

  -- tell calls a function of upstream.lua for each scope that a request names. If all return false, it is `nothing`.
  local function tell(act, r, list, now)
    local status = 'nothing'
    for _, number in ipairs(r.scopes) do
      local scope = list[number]
      scope.changed = true
      if act(scope, now, r) ~= false then status = 'ok' end
    end
    call.dirty = true
    look_again(r)
    return status, now, {time = now}
  end

  function verbs.pause(r, list, now) return tell(upstream().pause, r, list, now) end
  function verbs.resume(r, list, now) return tell(upstream().resume, r, list, now) end
  function verbs.remaining(r, list, now) return tell(upstream().remaining, r, list, now) end

  local function read_fate(r)
    local text = redis.call('GET', call.P .. 'n:' .. r.id)
    local fate = text and cjson.decode(text) or {}
    fate.settled, fate.added = fate.settled or {}, fate.added or {}
    return fate
  end

  -- remember writes the fate. It is kept until `time`, when nothing of the reservation counts, or longer.
  local function remember(r, fate, time)
    local ms = format('%d', max(ceil((time - call.now) / 1000), RECORD_MS))
    redis.call('SET', call.P .. 'n:' .. r.id, write_fields(fate), 'PX', ms)
    call.dirty = true
  end

  -- each_window calls act(scope, i, algorithm, st) for every window of the scopes.
  local function each_window(list, act)
    for _, scope in ipairs(list) do
      for _, i in ipairs(scope.spec.windows) do act(scope, i, call.windows[i].algorithm, scope.states[i]) end
    end
  end

  -- counted_until returns when no unit is counted any more in any window that has a cost or a change.
  local function counted_until(list, now, costs, changes)
    local time = now
    each_window(list, function(_, i, algorithm, st)
      if costs[i] ~= 0 or changes[i] ~= 0 then time = max(time, algorithm.resets_at(st, now)) end
    end)
    return time
  end

  -- costs_now returns the costs by window. Corrected ones also go into the answer: the caller may know earlier ones.
  local function costs_now(r, fate)
    local costs = {}
    for i, window in ipairs(call.windows) do costs[i] = fate.settled[window.name] or r.costs[i] end
    if next(fate.settled) then r.old_costs = costs end
    return costs
  end

  -- refund gives back units granted at `at`. If that is later than now, the clock was set back, and no state has them.
  local function refund(algorithm, st, now, at, units, id)
    if units > 0 and at <= now then algorithm.give_back(st, now, at, units, id) end
  end

  -- correct_window adds `change` units to what window i counts. Below 0 it gives back units, first those added before.
  local function correct_window(r, now, fate, i, algorithm, st, change)
    local name, id, added = call.windows[i].name, lease_id(call, r.id), fate.added
    local before = added[name] or 0
    if change > 0 then
      algorithm.charge(st, now, change, 0, id)
      added[name], fate.added_at = before + change, fate.added_at or now
      return
    end
    local from_added = min(-change, before)
    if from_added > 0 then
      refund(algorithm, st, now, fate.added_at, from_added, id)
      added[name] = before - from_added
    end
    refund(algorithm, st, now, r.at, -change - from_added, id)
  end

  -- correct changes what windows count for a reservation of these costs. It returns how many units came back.
  local function correct(r, list, now, fate, costs, changes)
    -- The fate is kept as long as if no unit had been given back, as the caller may not know that some were.
    local time, given = counted_until(list, now, r.costs, changes), 0
    each_window(list, function(_, i, algorithm, st)
      local used = st.used
      if changes[i] ~= 0 then correct_window(r, now, fate, i, algorithm, st, changes[i]) end
      given = given + used - st.used
    end)
    for _, scope in ipairs(list) do
      scope.changed = true
      if scope.sections then upstream().correct(scope, costs, changes, now, r.at) end
    end
    remember(r, fate, max(time, counted_until(list, now, r.costs, changes)))
    return given
  end

  function verbs.cancel(r, list, now)
    if r.lost then -- the record of the lost call tells whether it granted this request, and when: see decide.lua
      call.dirty = true -- so that a late copy of the lost call does nothing
      local record, in_record = r.known or '', 8 * r.lost
      local granted = sub(record, in_record, in_record) == 'o'
      if not granted or unpack7(record, 1) ~= r.lost_seq then return 'nothing', now end
      r.at = unpack7(record, in_record + 1)
    end
    local fate, changes = read_fate(r), {}
    if fate.cancelled then return 'nothing', now end
    local costs = costs_now(r, fate)
    -- A lease is given back whole, by any number below 0: settlements do not change it.
    for i, cost in ipairs(costs) do changes[i] = -max(cost, call.windows[i].algorithm.release and 1 or 0) end
    for _, i in ipairs(r.never or {}) do changes[i] = 0 end
    fate.cancelled = true
    local given = correct(r, list, now, fate, costs, changes)
    if call.line and r.rank then call.line.tags_back(r) end -- the take had moved the tenant's tag
    look_again(r)
    return given > 0 and 'ok' or 'nothing', now
  end

  -- A repeated put_back does nothing: the ticket may have been taken since, and others may have got its units.
  function verbs.put_back(r, list, now)
    local line = line_of(r)
    local _, _, rank = line.ticket(r.ticket)
    if rank and rank + 0 == r.rank or read_fate(r).cancelled then return 'nothing', now end
    verbs.cancel(r, list, now)
    if not rank then line.join(r, list, now) end -- a ticket that has joined again stays where it is
    return 'ok', now
  end

  -- A renewal may still be on its way, even of a lease that has expired. It must not begin the lease anew. So a release
  -- is remembered for a lease at least, unless the reservation never held one, as it cost nothing in these windows.
  function verbs.release(r, list, now)
    local fate, freed = read_fate(r), false
    local settled = next(fate.settled) ~= nil -- then the fate has costs, which are kept as long as they count
    local time = settled and counted_until(list, now, r.costs, r.costs) or now
    each_window(list, function(scope, i, algorithm, st)
      if not algorithm.release then return end
      scope.changed = true
      local units = algorithm.release(st, now, r.at, r.costs[i], lease_id(call, r.id))
      local may_have_held = units > 0 or r.costs[i] > 0 or settled -- settled: an earlier cost may not have been 0
      if units > 0 then freed = true end
      if may_have_held then fate.released = true end
      time = max(time, now + st.lease)
    end)
    if fate.released and not fate.cancelled then remember(r, fate, time) end
    if not freed then return 'nothing', now end
    look_again(r)
    return 'ok', now
  end

  function verbs.renew(r, list, now)
    local status, fate, never = 'ok', read_fate(r), {}
    local ended = fate.cancelled or fate.released
    for _, i in ipairs(r.never or {}) do never[i] = true end -- windows that never counted it need not hold it
    each_window(list, function(scope, i, algorithm, st)
      if not algorithm.renew then return end
      scope.changed = true
      if r.costs[i] == 0 then return end
      local id, waits = lease_id(call, r.id), call.line and call.line.waits_at(scope.suffix)
      if ended or algorithm.renew(st, now, r.costs[i], id, waits) == 0 and not never[i] then status = 'nothing' end
    end)
    call.dirty = true
    return status, now
  end

  function verbs.settle(r, list, now)
    local fate, changes, changed = read_fate(r), {}, false
    if fate.cancelled then return 'nothing', now end
    local costs = costs_now(r, fate)
    for i, cost in ipairs(costs) do
      local actual = r.actual[i]
      changes[i] = actual >= 0 and actual - cost or 0
      changed = changed or changes[i] ~= 0
      if actual >= 0 then fate.settled[call.windows[i].name] = actual end
    end
    if not changed then return 'nothing', now end
    correct(r, list, now, fate, costs, changes)
    look_again(r) -- also after units were added, as a first flow may have to wait at another node now
    return 'ok', now
  end

  return verbs
end

local function verb(op) return made_once(new_verbs, call)[op] end

-- replace gives back the grant of r.at, once: a later cancel or copy of the request does nothing.
local function replace(r, list, now)
  local replaced = {id = r.replaces, at = r.at, costs = r.costs, suffixes = r.suffixes, line_part = ''}
  verb('cancel')(replaced, list, now)
end
