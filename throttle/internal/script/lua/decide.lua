-- decide.lua: decides about requests of one policy, one after the other, as if each came alone.
--
-- KEYS and the beginning of ARGV: windows.lua. Then any number of requests, each of 5 + S values:
--   1 op        a verb of the table below
--   2 costs     "requests=1,tokens=5", "-" for none
--   3 ticket    "QUEUE/ID"; empty: does not wait
--   4 place     "flow tenant weight key" (line.lua), "-" for what is empty: flow "QUEUE|VALUES", weight in thousandths. Empty
--               where no line is asked
--   5 more      empty, as for most, or three texts with tabs between them, each of which may be empty:
--               own      the tenant's own parameters (windows.lua), in place of the policy's
--               options  of the place: "front max_wait backlog deadline rank", times in us, rank only if it is put back
--               extra    "id at once hold word", "-" for what is empty:
--               id       16 hex digits: of the reservation
--               at       when it was granted (us); 0 if it was not yet
--               once     end of the key by which a repeated request is known for a minute
--               hold     for how long what is granted may be held where it has to be given back (us)
--               word     settle: "ID d1,d2,...": an id of the correction, and by window what is to be added, or given back if below 0;
--                        pause: "PLACES wait guess ramp ramp_most mode BY"; resume: "PLACES"; remaining: "PLACES unit units reset"
--                        (PLACES: the scopes meant, by number and commas; times in us; BY: the tenant that was refused;
--                        guess: 0, or the longest pause if the upstream did not say for how long; mode: 0, 1, 2 for adapt: off, spread, full)
--   then S ends of the scopes' keys, narrow to broad
--
--   reserve     takes the costs in all windows or in none; with a ticket, who is denied joins the line. With `at`, what was
--               granted then is given back first, and who waits goes after it
--   exempt      takes them, and is never denied        peek     tells what reserve would, and changes nothing
--   join        puts the ticket in line                put_back puts it back at its rank, with what it had been granted
--   leave       takes the ticket out of the line       refresh  writes the flow's weight and own parameters anew
--   cancel      gives everything back, once; of what was taken from the line, with its place, also what its tenant's tags moved by
--   release     gives back what is held by leases
--   renew       keeps that for as long again           settle   corrects what was taken, once for each word
--   pause, resume, remaining                           what the upstream said (upstream.lua)
--
-- reply  for every request one of these, each followed, of reserve, exempt, peek and cancel, by what it says of every window:
--   plain  status at                              a plain grant, or done     window: used (units) resets (us)
--   full   status+16 at time most least behind nudge pause    anything else              window: used (units) fits (us, 0 for at once; of a cancel: units) resets (us)
--   error  9 text
--   status 0 denied, does not wait   1 granted, done   2 granted before, to the same call or key   3 joined the line   4 refused: longer than
--          max_wait   5 refused: backlog   6 stands in line already   7 refused: after the deadline   8 nothing to do, or a lease is lost
--   at     when it was decided, or granted before      time, most, least  the expected start, its upper and its lower bound
--   behind how far the clock is behind the windows, which stand still until it has caught up    nudge  1: a server should be woken
--   pause  empty, or "UNTIL OPEN BY;RATE SINCE REFUSALS WINDOW": what the upstream had paused, who was refused, and what it adapts to (upstream.lua)

local byte, char, sub, find, match, gmatch, format, max, min = string.byte, string.char, string.sub, string.find, string.match, string.gmatch, string.format, math.max, math.min
local call = windows.read_policy()
local KEPT = 60000 -- ms for which a repeated call is recognised
local NEEDS_WINDOWS = {reserve = true, exempt = true, peek = true, cancel = true}

local nscopes, nwindows, argv, first, P = #call.scopes, #call.windows, ARGV, call.first, call.P
local stride = 5 + nscopes

-- What this process's call before this one did, if it is this very call that is repeated; and all scopes.
local record_key = P .. 'r:' .. call.process
local reads, suffixes, n, raw = {P .. 'q', record_key}, {}, 0, call.raw
for at = first + 5, #argv, stride do
  for s = at, at + nscopes - 1 do
    local suffix = argv[s]
    if raw[suffix] == nil then
      raw[suffix] = false
      n = n + 1
      suffixes[n], reads[n + 2] = suffix, P .. suffix
    end
  end
end
local values = redis.call('MGET', unpack(reads))
scopes.keep(call, suffixes, reads, values, 3)
call.waiting = (values[1] or 0) + 0
local last = values[2] and codec.unpack7(values[2], 1) or 0
local record = last == call.seq and values[2]
local late = last > call.seq -- a copy of a call whose caller has given up

local line -- the verbs of line_join.lua, once they are needed
local function make_line()
  local new_line, new_join = line_files()
  call.line = new_line(call)
  line = new_join(call.line)
end

local function get_line()
  if not line then
    make_line()
    call.line.read_line()
  end
end

local NOT_GRANTED = '\0\0\0\0\0\0\0' -- stands in the record for the time of what was not

local dirty = false -- something was changed that must not be done twice

-- read_place reads what only a line asks for.
local function read_place(r)
  if r.flow or r.place == '' then return end
  r.queue, r.flow, r.tenant, r.weight, r.key = match(r.place, '^(([^|]*)%S*) (%S+) (%S+) (%S+)$')
  r.queue, r.flow = r.flow, r.queue
  if r.options ~= '' then
    local front, max_wait, backlog, deadline, rank = match(r.options, '^(%S+) (%S+) (%S+) (%S+) (%S+)$')
    r.front, r.max_wait, r.backlog, r.deadline = front == '1', max_wait + 0, backlog + 0, deadline + 0
    if r.op == 'put_back' then r.rank = rank end
  end
end

local function lease_id(r)
  if call.leases and not r.lease then r.lease = windows.lease_bytes(r.id) end
  return r.lease
end

local function take(r, list, now)
  windows.take(call, list, r.costs, now, r.hold, lease_id(r))
  if r.once then
    local state_key = P .. 'n:' .. r.id
    redis.call('SET', P .. 'n:' .. r.once, format('%d', now), 'PX', KEPT)
    if redis.call('EXISTS', state_key) == 1 then redis.call('SET', state_key, format('%d again', now), 'KEEPTTL') end
  end
  dirty = true
end

local function look_again(r)
  if line then line.look_again(r.suffixes) end
end

local function granted_before(r, before)
  if before == 1 then return r.done_at end
  return r.once and tonumber(redis.call('GET', P .. 'n:' .. r.once) or nil)
end

-- A verb takes the request, its scopes and their time, a place for when each window fits, and what an earlier attempt
-- of the same call did. It returns status, at, and unless it is a plain grant or done: time, most, nudge and least.
-- Most calls need only these two.
local verbs = {
  reserve = function(r, list, now, fits, before)
    local granted = granted_before(r, before)
    if granted then return 2, granted end
    if r.at > 0 then
      windows.give_back(call, list, r.costs, now, r.at, lease_id(r))
      look_again(r)
    end
    local waits = r.ticket and line and line.waits(r.ticket)
    local time = windows.fits_at(call, list, r.costs, now, fits)
    if line then read_place(r) end
    if time <= now and (not line or r.at > 0 or not line.somebody_waits(r, waits and r.ticket)) then
      take(r, list, now)
      if waits then line.remove(r.ticket) end
      return 1, now
    end
    if r.ticket then
      dirty = true
      get_line()
      read_place(r)
      local status, low, high, nudge, least = line.join(r, list, now)
      least = least or low
      return status, call.now, max(time, low), max(time, high), nudge, call.leases and least or max(time, least)
    end
    local most, least = time, nil
    if call.leases then -- slots may be given back at any time
      least = now
      for i = 1, nwindows do
        if not call.windows[i].algorithm.release then least = max(least, fits[i]) end
      end
    end
    if line then
      local low, high = line.expect(r, list, now, fits)
      time, most = max(time, low), max(time, high)
      -- Everything fits, and others wait for slots: they may have gone by then.
      if time <= now then time, most = now + 100000, max(most, now + 100000) end
    end
    return 0, call.now, time, most, 0, least
  end,

  join = function(r, list, now, fits, before)
    get_line()
    read_place(r)
    if before == 3 and not line.waits(r.ticket) then return 3, call.now, now, now, 0 end -- it was taken since
    dirty = true
    local status, low, high, nudge, least = line.join(r, list, now)
    if before == 3 then status, nudge = 3, 1 end -- a nudge too many does no harm
    return status, call.now, low, high, nudge, least
  end,
}

local function later_verbs()
  local function once_key(r) return P .. 'n:' .. r.once end
  local function state_key(r) return P .. 'n:' .. r.id end

  function verbs.exempt(r, list, now, fits, before)
    local granted = granted_before(r, before)
    if granted then return 2, granted end
    take(r, list, now)
    if line and r.ticket then line.remove(r.ticket) end
    return 1, now
  end

  function verbs.peek(r, list, now, fits)
    local time = windows.fits_at(call, list, r.costs, now, fits)
    local most = time
    if line then
      read_place(r)
      if line.somebody_waits(r, r.ticket) then
        local low, high = line.expect(r, list, now, fits)
        time, most = max(time, low), max(most, high)
        if time <= now then time, most = now + 100000, max(most, now + 100000) end
      end
    end
    if time > now then return 0, call.now, time, most, 0 end
    for s = 1, #list do
      if list[s].upstream then return 1, now, now, now, 0 end -- it is asked what the upstream said, too
    end
    return 1, now
  end

  function verbs.put_back(r, list, now, fits, before)
    if before == 1 then return 1, r.done_at end
    dirty = true
    get_line()
    read_place(r)
    if line.waits(r.ticket) then return 8, now end
    windows.give_back(call, list, r.costs, now, r.at, lease_id(r))
    line.take_back(r)
    line.join(r, list, now)
    look_again(r)
    return 1, now
  end

  function verbs.leave(r, list, now)
    if not line or not line.remove(r.ticket) then return 8, now end
    dirty = true
    return 1, now
  end

  function verbs.refresh(r, list, now)
    if not line then return 8, now end
    read_place(r)
    line.refresh(r)
    return 1, now
  end

  -- What becomes of a reservation is known by the key of its id: "AT", and, by blanks, the last
  -- correction, what corrections added and have not given back ("+TIME:WINDOW=UNITS,..."), and
  -- whether it was cancelled or released. Most reservations never have that key. The id of one made
  -- by an idempotency key may be granted anew later: what became of it before is then forgotten,
  -- and what was granted before counts as cancelled.
  local CANCELLED, RELEASED, AGAIN = ' cancelled', ' released', ' again'
  local ADDED = 16 -- corrections of one reservation whose times are known

  local function state_of(r)
    local state = redis.call('GET', state_key(r))
    local of = state and tonumber(match(state, '^%d+'))
    r.again = state and find(state, AGAIN, 1, true) and AGAIN or ''
    if of and of < r.at and r.again == '' then state = false end
    r.cancelled = state and (of ~= r.at or find(state, CANCELLED, 1, true))
    r.released = state and sub(state, -#RELEASED) == RELEASED
    r.added = {}
    for at, units in gmatch(state or '', ' %+(%d+):(%S+)') do
      local added = {at = at + 0, units = {}}
      for window, n in gmatch(units, '([^=,]+)=(%d+)') do added.units[window] = n + 0 end
      r.added[#r.added + 1] = added
    end
    return state
  end

  -- What corrections added, for the key. Of many, the oldest count as one, from the time of the
  -- first: what does not count any more is then not given back.
  local function added_text(r)
    local parts = {}
    while #r.added > ADDED do
      local second = table.remove(r.added, 2)
      for window, n in pairs(second.units) do r.added[1].units[window] = (r.added[1].units[window] or 0) + n end
    end
    for _, added in ipairs(r.added) do
      local units = {}
      for window, n in pairs(added.units) do
        if n > 0 then units[#units + 1] = format('%s=%d', window, n) end
      end
      if units[1] then parts[#parts + 1] = format(' +%d:', added.at) .. table.concat(units, ',') end
    end
    return table.concat(parts)
  end

  -- give_back gives back units of a window: those first that a correction added last.
  local function give_back(r, scope, i, now, units)
    local window, st, given = call.windows[i], scope.states[i], 0
    for k = #r.added, 1, -1 do
      local added = r.added[k]
      local part = min(units, added.units[window.name] or 0)
      if part > 0 then
        added.units[window.name], units = added.units[window.name] - part, units - part
        if added.at <= now then given = given + window.algorithm.give_back(st, now, added.at, part, lease_id(r)) end
      end
    end
    -- What a lease holds is not what was settled since. What was granted later than now, before a
    -- clock was set back, is in no state any more.
    if (units > 0 or window.algorithm.release) and r.at <= now then
      given = given + window.algorithm.give_back(st, now, r.at, units, lease_id(r))
    end
    return given
  end

  -- until_all is when nothing of the costs is counted any more.
  local function until_all(list, now, costs, changes)
    local time = now
    for _, scope in ipairs(list) do
      for _, i in ipairs(scope.of.windows) do
        if costs[i] ~= 0 or changes and changes[i] ~= 0 then time = max(time, call.windows[i].algorithm.resets_at(scope.states[i], now)) end
      end
    end
    return time
  end

  local function remember(r, value, time)
    redis.call('SET', state_key(r), value, 'PX', format('%d', max(math.ceil((time - call.now) / 1000), KEPT)))
    dirty = true
  end

  function verbs.cancel(r, list, now, fits, before)
    if before == 1 then return 1, r.done_at end
    state_of(r)
    if r.cancelled then return 8, now, now, now, 0 end
    local time = until_all(list, now, r.costs)
    for _, scope in ipairs(list) do
      scopes.touch(scope, now)
      for _, i in ipairs(scope.of.windows) do fits[i] = give_back(r, scope, i, now, r.costs[i]) end
    end
    remember(r, format('%d', r.at) .. r.again .. CANCELLED, time)
    if r.once then redis.call('DEL', once_key(r)) end
    if line then
      read_place(r)
      if r.flow then line.take_back(r) end
    end
    look_again(r)
    return 1, now, now, now, 0
  end

  function verbs.release(r, list, now)
    local state = state_of(r)
    local time, freed = state and find(state, ' ', 1, true) and until_all(list, now, r.costs) or now, false
    for _, scope in ipairs(list) do
      for _, i in ipairs(scope.of.windows) do
        local algorithm, st = call.windows[i].algorithm, scope.states[i]
        if algorithm.release then
          scopes.touch(scope, now)
          if algorithm.release(st, now, r.at, r.costs[i], lease_id(r)) > 0 then
            freed = true
            time = max(time, now + st.lease) -- a renewal may still be on its way, or come
          end
        end
      end
    end
    if not freed then return 8, now end
    if not r.cancelled then remember(r, (state or format('%d', r.at)) .. RELEASED, time) end
    look_again(r)
    return 1, now
  end

  function verbs.renew(r, list, now)
    local status = 1
    state_of(r)
    for _, scope in ipairs(list) do
      for _, i in ipairs(scope.of.windows) do
        local algorithm = call.windows[i].algorithm
        if algorithm.renew and r.costs[i] > 0 then
          scopes.touch(scope, now)
          if r.cancelled or r.released or algorithm.renew(scope.states[i], now, r.costs[i], lease_id(r)) == 0 then status = 8 end
        end
      end
    end
    dirty = true
    return status, now
  end

  function verbs.settle(r, list, now, fits, before)
    if before == 1 then return 1, r.done_at end
    local id, deltas = match(r.word, '^(%S+) (%S+)$')
    local own, state, changes = ' ' .. id, state_of(r), {}
    for delta in gmatch(deltas, '[^,]+') do changes[#changes + 1] = tonumber(delta) end
    if r.cancelled or state and find(state, own, 1, true) then return 8, now end
    local adds = {at = now, units = {}}
    for _, scope in ipairs(list) do
      scopes.touch(scope, now)
      for _, i in ipairs(scope.of.windows) do
        local window, change = call.windows[i], changes[i]
        if change > 0 then
          window.algorithm.take(scope.states[i], now, change, 0, lease_id(r))
          adds.units[window.name] = change
        elseif change < 0 then
          give_back(r, scope, i, now, -change)
        end
      end
    end
    r.added[#r.added + 1] = adds
    remember(r, format('%d', r.at) .. r.again .. own .. added_text(r) .. (r.released and RELEASED or ''), until_all(list, now, r.costs, changes))
    look_again(r) -- also by what was added: whoever is first may wait for this window now, and hold up nobody
    return 1, now
  end

  local function upstream_verb(say)
    return function(r, list, now, fits, before)
      if before == 1 then return 1, r.done_at end
      local status = 8
      local places, rest = match(r.word, '^(%S+) ?(.*)$')
      for place in gmatch(places, '%d+') do
        for _, scope in ipairs(list) do
          if scope.of.number == tonumber(place) then
            scopes.touch(scope, now)
            if say(r, scope, now, rest) ~= false then status = 1 end
          end
        end
      end
      dirty = true
      look_again(r)
      return status, now, now, now, 0
    end
  end

  verbs.pause = upstream_verb(function(r, scope, now, rest)
    local wait, guess, ramp, most, mode, by = match(rest, '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+)$')
    return upstream().pause(scope, now, r.at, wait + 0, guess + 0, ramp + 0, most + 0, mode + 0, by)
  end)
  verbs.resume = upstream_verb(function(r, scope)
    upstream().put(scope, '!', 'p', 0, '')
    upstream().put(scope, '!a', 'a', 0, '')
  end)
  verbs.remaining = upstream_verb(function(r, scope, now, rest)
    local unit, units, reset = match(rest, '^(%S+) (%S+) (%S+)$')
    upstream().remaining(scope, unit, now, r.at > 0 and r.at or now, units + 0, now + reset)
  end)
end

-- Everything that the line will be asked for in this call is read at once.
if call.waiting > 0 or argv[first] == 'join' then
  local tickets, flows, nodes, seen = {}, {}, {}, {}
  for at = first, #argv, stride do
    if argv[at + 2] ~= '' then tickets[#tickets + 1] = argv[at + 2] end
    local flow = match(argv[at + 3], '^%S+')
    if flow and not seen[flow] then
      seen[flow] = true
      flows[#flows + 1] = flow
      local queue = match(flow, '^([^|]*)') .. '|'
      for s = at + 5, call.only_tenants and at or at + 4 + nscopes do
        if not seen[queue .. argv[s]] then
          seen[queue .. argv[s]] = true
          nodes[#nodes + 1] = 'n ' .. queue .. argv[s]
        end
      end
      if not seen[queue] then
        seen[queue] = true
        nodes[#nodes + 1] = 'n ' .. queue .. windows.ROOT
      end
    end
  end
  make_line()
  line.prefetch(tickets, flows, nodes)
end

local out, done, count, m = {}, {}, 0, 0 -- done: what the record says of every request
local list = {}                         -- the scopes of one request
local last_grant, last_at                -- what the record says of the last grant: those of a batch are alike
for at = first, #argv, stride do
  count = count + 1
  local own_text, options, extra, own, failed = argv[at + 4], '', '', nil, nil
  if own_text ~= '' then
    own_text, options, extra = match(own_text, '^([^\t]*)\t([^\t]*)\t(.*)$')
    own = windows.own_parameters(call, own_text)
  end
  for i = 1, nscopes do
    local suffix = argv[at + 4 + i]
    local scope = call.open[suffix]
    if not scope or scope.own ~= own then scope = scopes.open(call, suffix, i, own) end
    failed = failed or scope.failed
    list[i] = scope
  end
  local now, op = windows.align(call, list), argv[at]
  local needs_windows = NEEDS_WINDOWS[op]
  if late then
    out[m + 1], out[m + 2] = 8, now
    m = m + 2
    for i = 1, needs_windows and 2 * nwindows or 0 do out[m + i] = 0 end
    if needs_windows then m = m + 2 * nwindows end
  elseif failed and op ~= 'leave' then
    out[m + 1], out[m + 2] = 9, failed
    m = m + 2
    done[count] = char(9) .. codec.pack7(now)
  else
    local verb = verbs[op]
    if not verb then
      later_verbs()
      verb = verbs[op]
    end
    local costs_text, ticket, place = argv[at + 1], argv[at + 2], argv[at + 3]
    local r = {
      op = op, costs = windows.costs_of(call, costs_text).windows, costs_text = costs_text, ticket = ticket ~= '' and ticket, place = place,
      options = options, at = 0, hold = 0,
    }
    if extra ~= '' then
      local id, granted_at, once, hold, word = match(extra, '^(%S+) (%S+) (%S+) (%S+) (.*)$')
      r.id, r.at, r.hold, r.word = id, granted_at + 0, hold + 0, word
      if once ~= '-' then r.once = once end
    end
    if line or place ~= '' or extra ~= '' then
      r.own, r.suffixes = own_text, {}
      for i = 1, nscopes do r.suffixes[i] = argv[at + 4 + i] end
    end
    local before = record and byte(record, 8 * count)
    if before then r.done_at = codec.unpack7(record, 8 * count + 1) end
    local fits = {}
    local status, decided, time, most, nudge, least = verb(r, list, now, fits, before)
    if before == 1 then
      done[count] = sub(record, 8 * count, 8 * count + 7)
    elseif status == 1 then
      if last_at ~= decided then last_grant, last_at = char(1) .. codec.pack7(decided), decided end
      done[count] = last_grant
    else
      done[count] = char(status) .. (status == 2 and codec.pack7(decided) or NOT_GRANTED)
    end
    local long = time or now > call.now
    if long then
      time = time or decided
      out[m + 1], out[m + 2], out[m + 3], out[m + 4], out[m + 5], out[m + 6], out[m + 7] = status + 16, decided, time, most or time, least or time, now - call.now, nudge or 0
      m = m + 8
      out[m] = ''
      for s = 1, nscopes do
        if list[s].upstream then out[m] = upstream().said(list, now) end
      end
    else
      out[m + 1], out[m + 2] = status, decided
      m = m + 2
    end
    if needs_windows then
      local step = long and 3 or 2
      for s = 1, nscopes do
        local of, states = list[s].of.windows, list[s].states
        for j = 1, #of do
          local i = of[j]
          local algorithm, st, o = call.windows[i].algorithm, states[i], m + step * i
          out[o] = algorithm.resets_at(st, now)
          if long then
            out[o - 2], out[o - 1] = algorithm.used(st), fits[i] or 0
          else
            out[o - 1] = algorithm.used(st)
          end
        end
      end
      m = m + step * nwindows
    end
  end
end

if call.line and call.line.dead_claims then line.sweep() end
scopes.write_all(call)
if call.line then call.line.finish() end
if dirty and not late then redis.call('SET', record_key, codec.pack7(call.seq) .. table.concat(done), 'PX', KEPT) end
return out
