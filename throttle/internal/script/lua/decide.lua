-- decide.lua: decides about requests of one policy, one after the other, as if each came alone.
--
-- KEYS and the beginning of ARGV: windows.lua. Then any number of requests, each of 5 + S values:
--   1 op        a verb of the table below
--   2 costs     "requests=1,tokens=5", "-" for none
--   3 ticket    "QUEUE/ID"; empty: does not wait
--   4 place     "flow tenant weight key" (line.lua), "-" for what is empty: flow "QUEUE|VALUES",
--               weight in thousandths; empty where no line is asked
--   5 more      empty for most requests, or three texts with tabs between them, each may be empty:
--               own      the tenant's own parameters (windows.lua), in place of the policy's
--               options  of the place: "front max_wait backlog deadline rank", times in us, rank
--                        only if it is put back
--               extra    "id at once hold word", "-" for what is empty:
--               id       16 hex digits: of the reservation
--               at       when it was granted (us); 0 if it was not yet. With reserve, ":ID" may
--                        follow, if what it replaces has another id
--               once     end of the key by which a repeated request is known for a minute
--               hold     how long what is granted may be held where it has to be given back (us)
--               word     with `once`: a digest of what counts the request
--                        settle: "c1,c2,...": by window what it really cost, "-" if that stays
--                        cancel: the numbers of windows that never counted it, by commas
--                        pause: "PLACES wait guess ramp ramp_most mode BY"; resume: "PLACES"
--                        remaining: "PLACES unit units reset"
--                        (PLACES: the numbers of the scopes meant, by commas; times in us; BY: who was
--                        refused, by what, who reported it, and by hand: see upstream.lua; guess:
--                        the longest pause, or 0 if the upstream said how long; mode: 0, 1, 2 for
--                        adapt: off, spread, full)
--   then S ends of the scopes' keys, narrow to broad
--
-- Verbs:
--   reserve     takes the costs in all windows, or in none. A denied request with a ticket joins
--               the line. With `at`, what was granted then is given back first, once, and others
--               that wait go after it
--   exempt      takes the costs, and is never denied
--   observe     exempt, and tells by when the costs would have fitted
--   peek        tells what reserve would, and changes nothing
--   join        puts the ticket in line
--   put_back    puts the ticket back at its rank, once, with what it had been granted
--   leave       takes the ticket out of the line
--   refresh     writes the flow's weight and own parameters as they are now
--   expect      tells when the ticket is expected to start, or without one the last of the flow, and
--               when each window fits it; changes nothing. If it does not wait, the times are those
--               of the costs
--   cancel      gives everything back, once; of what was taken from the line, with its place, it
--               also undoes what its tenant's tags moved by
--   release     gives back what is held by leases
--   renew       keeps what is held by leases for as long again
--   settle      corrects what was taken
--   pause       notes that the upstream refused: nothing is granted for a while (upstream.lua)
--   resume      ends a pause, and what the scopes adapted to
--   remaining   notes how many units the upstream has left
--
-- reply  for every request one of these forms. For reserve, exempt, observe, peek, expect and cancel
--        the values of every window follow
--   plain         status at                                        a plain grant, or done
--   plain window  used resets
--   full          status+16 at time latest binds behind nudge pause  anything else
--   full window   used fits resets
--   corrected     before                                           settle and cancel, after the form
--   error         9 text
-- where
--   status  0 denied, does not wait   1 granted, done   2 granted before, by the same key
--           3 joined the line   4 refused: longer than max_wait   5 refused: backlog   6 stands in
--           line already   7 refused: after the deadline   8 depends on the verb:
--             cancel, put_back           that was done before
--             release                    nothing was held
--             renew                      a lease is lost
--             settle                     nothing changes
--             leave, refresh             nothing waits
--             expect                     it does not wait
--             pause, resume, remaining   no scope learns anything
--             any verb                   not done: a late copy of a call whose caller gave up
--           10 the key was granted to another request
--   at      when it was decided, or granted before (us, as all times)
--   time    the expected start; latest: its upper bound, 0 if none is known
--   binds   the number of the window that holds it up for longest, 0 if none does, -1: handler slots
--   behind  how far the clock is behind the windows, which stand still until it has caught up
--   nudge   1: a server should be woken
--   pause   empty, or "UNTIL OPEN BY;RATE SINCE REFUSALS WINDOW CHANGED FREE": what the upstream
--           had paused, who was refused, and what the scopes adapted to (said in upstream.lua)
--   before  what the reservation cost, as the word of settle; empty if the request says the same
--   used    units
--   fits    when the costs fit this window, 0 for at once; of cancel: the units given back
--   resets  when nothing is counted any more
--
-- Keys, behind the prefix P of the policy:
--   r:PROCESS     what the last call of a process did, which answers that call if it is repeated:
--                 seq(7), then for every request status(1) at(7), 0 if nothing was granted
--   n:TENANT:KEY  when the request of an idempotency key was granted, a blank, and its digest

local call = windows.read_policy()
local KEPT = 60000 -- ms for which a repeated call is recognised

local nscopes, nwindows, argv, first, P = #call.scopes, #call.windows, ARGV, 7, call.P
local seq = argv[3] + 0
local stride = 5 + nscopes

-- The count of the line, the record of this process, and all scopes are read in one command.
local record_key = P .. 'r:' .. argv[2]
local reads, suffixes, n, raw = {P .. 'q', record_key, nil, nil}, {nil}, 0, call.raw
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
if values[1] then call.waiting = values[1] + 0 end
local last = values[2] and unpack7(values[2], 1) or 0
local record = last == seq and values[2] -- this very call, which is repeated
local late = last > seq                       -- a copy of a call whose caller has given up

local NOT_GRANTED = '\0\0\0\0\0\0\0'

-- A verb takes the request, its scopes and their time, a place for when each window fits, and the
-- status that an earlier attempt of the same call got. It returns status, at, and unless it is a
-- plain grant or done: time, latest, binds and nudge. Most calls need only these two verbs.
local verbs = {
  reserve = function(r, list, now, fits, before)
    if r.at > 0 and before ~= 1 then requests.replace(call, r, list, now) end
    if before or r.once then
      local status, at = requests.granted_before(call, r, before)
      if status then return status, at end
    end
    local line = call.line
    local waits = r.ticket and line and line.waits(r.ticket)
    local time = windows.fits_at(call, list, r.costs, now, fits)
    if line then requests.read_place(r) end
    if time <= now and
      (not line or r.at > 0 or not line.somebody_waits(r, waits and r.ticket)) then
      requests.take(call, r, list, now)
      if waits then line.remove(r.ticket) end
      if call.batches and line then line.granted(r, list) end
      return 1, now
    end
    if r.ticket then
      call.dirty = true
      requests.read_place(r)
      local status, low, high, binds, nudge = requests.line(call).join(r, list, now)
      return status, call.now, max(time, low), high > 0 and max(time, high) or 0, binds, nudge
    end
    return requests.denied(call, r, list, now, fits, time)
  end,

  join = function(r, list, now, fits, before)
    local line = requests.line(call)
    requests.read_place(r)
    if before == 3 and not line.waits(r.ticket) then -- it was taken since
      return 3, call.now, now, now
    end
    call.dirty = true
    local status, low, high, binds, nudge = line.join(r, list, now)
    if before == 3 then status, nudge = 3, 1 end -- a nudge too many does no harm
    return status, call.now, low, high, binds, nudge
  end,
}

-- Everything that the line will be asked for in this call is read at once.
if call.waiting or argv[first] == 'join' then
  local line = requests.line(call)
  local tickets, flows, nodes, seen = {}, {}, {}, {}
  for at = first, #argv, stride do
    if argv[at + 2] ~= '' then tickets[#tickets + 1] = argv[at + 2] end
    local flow = match(argv[at + 3], '^%S+')
    if flow and not seen[flow] then
      seen[flow] = true
      flows[#flows + 1] = flow
      local queue = match(flow, '^([^|]*)') .. '|'
      if byte(queue, -2) == 33 then call.batches = true end
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
  line.prefetch(tickets, flows, nodes)
end

local out, m = {nil, nil, nil, nil, nil, nil}, 0
local done, count = {nil}, 0               -- what the record says of every request
local list, plain_fits = {nil}, {nil, nil} -- the scopes of one request, and when its costs fit
local last_grant, last_at                  -- of the record: the grants of a batch are alike
local all, open, scope_of = call.windows, call.open, call.scope_of
for at = first, #argv, stride do
  count = count + 1
  local own_text, options, extra, own, failed = argv[at + 4], '', '', nil, nil
  if own_text ~= '' then
    own_text, options, extra = match(own_text, '^([^\t]*)\t([^\t]*)\t(.*)$')
    own = windows.own_parameters(call, own_text)
  end
  local now, op, aligned = call.now, argv[at], true
  for i = 1, nscopes do
    local suffix = argv[at + 4 + i]
    local scope = open[suffix]
    if not scope or scope.own ~= own then scope = scopes.open(call, suffix, i, own) end
    if scope.failed then failed = failed or scope.failed end
    if scope.now ~= now then aligned = false end
    list[i] = scope
  end
  if not aligned then now = windows.align(call, list) end
  local needs_windows = op == 'reserve' or op == 'exempt' or op == 'peek' or op == 'cancel' or
    op == 'expect' or op == 'observe'
  local corrects = op == 'settle' or op == 'cancel'
  if late then
    out[m + 1], out[m + 2] = 8, now
    m = m + 2
    if corrects then
      m = m + 1
      out[m] = ''
    end
    for i = 1, needs_windows and 2 * nwindows or 0 do out[m + i] = 0 end
    if needs_windows then m = m + 2 * nwindows end
  elseif failed and op ~= 'leave' then
    out[m + 1], out[m + 2] = 9, failed
    m = m + 2
    done[count] = char(9) .. pack7(now)
  else
    local verb = verbs[op] or later_verbs(call)[op] or reservation_verbs(call)[op]
    local r = requests.read(call, argv, at, own_text, options, extra)
    local before = record and byte(record, 8 * count)
    if before then r.done_at = unpack7(record, 8 * count + 1) end
    local fits = op == 'reserve' and plain_fits or {}
    local status, decided, time, latest, binds, nudge = verb(r, list, now, fits, before)

    if before == 1 then
      done[count] = sub(record, 8 * count, 8 * count + 7)
    elseif status == 1 then
      if last_at ~= decided then last_grant, last_at = '\1' .. pack_time(decided), decided end
      done[count] = last_grant
    else
      done[count] = char(status) .. (status == 2 and pack7(decided) or NOT_GRANTED)
    end

    local full = time or now > call.now
    if full then
      time = time or decided
      out[m + 1], out[m + 2], out[m + 3], out[m + 4] = status + 16, decided, time, latest or time
      out[m + 5], out[m + 6], out[m + 7], out[m + 8] = binds or 0, now - call.now, nudge or 0, ''
      m = m + 8
      for s = 1, nscopes do
        if list[s].upstream then out[m] = upstream().said(list, now) end
      end
    else
      out[m + 1], out[m + 2] = status, decided
      m = m + 2
    end
    if corrects then
      m = m + 1
      out[m] = r.before or ''
    end
    if needs_windows then
      local step = full and 3 or 2
      for i = 1, nwindows do -- in this order, as a list that grows in another one costs more
        local algorithm, st = all[i].algorithm, list[scope_of[i]].states[i]
        out[m + 1] = algorithm.used(st)
        if full then out[m + 2] = fits[i] or 0 end
        m = m + step
        out[m] = algorithm.resets_at(st, now)
      end
    end
  end
end

scopes.write_all(call)
if call.line then call.line.finish() end
if call.dirty and not late then
  redis.call('SET', record_key, pack7(seq) .. concat(done), 'PX', KEPT)
end
return out
