-- decide.lua: decides the requests of one policy, one after the other, as if each came alone.
--
-- KEYS and the beginning of ARGV: windows.lua. Then any number of requests, each of 5 + S values (S: number of scopes):
--   1 op        a verb
--   2 costs     "requests=1,tokens=5", "-" for none
--   3 ticket    "QUEUE/ID"; empty for a request that does not wait
--   4 line_part "flow tenant weight key" (line.lua), "-" for an empty word: flow "QUEUE|VALUES",
--               weight in thousandths; empty for a request that joins no line
--   5 more      fields, as JSON; empty for most requests
--   then the S ends of its scopes' keys, narrow to broad
-- request.go describes each verb, and the fields: of requests the JSON tags of Request, of replies those of Answer.
--
-- The reply has for every request "failed" and a text, or these values:
--   answer  status at fields  `at` is when it was decided, or granted by an earlier copy; most have no fields
--   window  used resets       for reserve, exempt, observe, peek, expect and cancel, of every window: its units, and
--                             when none is counted any more
-- A status is ok (granted or done), denied, joined, waits (in line since before), too_long, backlog or too_late (all
-- three: refused), or nothing. What `nothing` means depends on the verb:
--   cancel, put_back  an earlier call did it; of a cancel also: nothing came back
--   release, renew    nothing was held; a lease is lost
--   settle            nothing changes
--   leave, expect     the ticket or flow does not wait (refresh: nobody waits in the whole line)
--   pause             it was news for no scope (`pause` in upstream.lua)
-- A late copy of a call whose caller gave up gets an empty reply, which nobody reads.
--
-- Keys, after the prefix P of the policy:
--   r:PROCESS     the record of a process's last call, which answers that call if it is repeated: seq(7), then for
--                 every request the first letter of its status, and at(7), dots unless it is ok. So request N has
--                 the bytes from 8 * N on

local call = read_policy()

local nscopes, nwindows, argv, first = #call.scopes, #call.windows, ARGV, 7
local seq, stride = argv[3] + 0, 5 + nscopes

-- The count of the line, the record of this process, and all scopes are read in one command.
local record_name = 'r:' .. argv[2]
local suffixes = {'q', record_name, nil, nil}
for from = first + 5, #argv, stride do
  for s = from, from + nscopes - 1 do suffixes[#suffixes + 1] = argv[s] end
end
scopes.read(call, suffixes)
call.waiting = call.raw.q
local last_record = call.raw[record_name]
local last_seq = last_record and unpack7(last_record, 1) or 0
if last_seq > seq then return {} end
local repeated = last_seq == seq and last_record -- the record, if an earlier copy of this call wrote it

local NO_TIME = '.......'         -- in the record
local OF_POLICY, OF_TENANT = 1, 2 -- PauseAnswer.Whose of request.go

-- A verb takes the request, its scopes, their time, a table that gets the time at which each window has room, and
-- whether an earlier copy of the call joined the line. It returns status, at, and nil or an answer (request_more.lua).
-- Most calls need only these two verbs.
local verbs = {
  reserve = function(r, list, now, fits, joined_before)
    local line, replaces = call.line, r.replaces
    local in_line = r.ticket and line and line.flow_name(r.ticket)
    local time = windows.fits_at(list, r.costs, now, fits)
    local granted = time <= now
    if granted and not replaces then -- what replaces a grant has had its turn: only windows deny it
      granted = not (r.paused or line and line.somebody_waits(r, in_line and r.ticket))
    end
    if granted then
      grant(call, r, list, now)
      if in_line then line.heads().remove(r.ticket) end
      if call.batches and line and not replaces then line.granted(r, list) end
      return 'ok', now
    end
    if r.ticket then
      call.dirty = true
      return made_once(extras, call).line_of(r).join(r, list, now, joined_before)
    end
    return made_once(extras, call).denied(r, list, now, fits, time)
  end,

  join = function(r, list, now, fits, joined_before)
    local line = call.line or made_once(extras, call).line_of(r)
    call.dirty = true
    local status, at, answer = line.join(r, list, now, joined_before)
    if status ~= 'waits' and not answer.nudge and answer.latest == at then answer = nil end -- as it may start at once
    return status, at, answer
  end,
}

-- If there is a line, or a join comes first, all requests are read first: few commands read what they need of it.
local requests
if call.waiting or argv[first] == 'join' then
  local line = made_once(extras, call).line_of()
  requests = {}
  for from = first, #argv, stride do requests[#requests + 1] = read_request(call, argv, from) end
  line.prefetch(requests)
end

local reply, n = {nil, nil, nil, nil, nil, nil}, 0 -- n: its length
local outcomes, number = {nil}, 0 -- what the record says of each request, and the number of the current one
local list, reserve_fits = {nil}, {nil, nil} -- the scopes of one request; `fits` of a `reserve`, which fills it

for from = first, #argv, stride do
  number = number + 1
  local r, failed = requests and requests[number] or read_request(call, argv, from), nil
  local op, settings = r.op, r.settings and windows.settings_of(call, r.settings)
  for i = 1, nscopes do list[i] = scopes.open(call, argv[from + 4 + i], i, settings) end
  local now = windows.align(call, list) -- which may fail a scope
  for i = 1, nscopes do failed = failed or list[i].failed end
  local in_record = 8 * number -- where the record has the request
  local letter = repeated and sub(repeated, in_record, in_record) -- of the status that an earlier copy answered
  local done_before, joined_before = letter == 'o', letter == 'j'
  if call.paused or settings then
    local of_policy, of_tenant = call.paused or 0, settings and settings.paused or 0 -- when operators' pauses end
    local ends = max(of_policy, of_tenant)
    r.paused, r.whose = ends > now and ends or nil, of_policy > of_tenant and OF_POLICY or OF_TENANT
    r.unlimited = settings and settings.unlimited
    -- Operators' pauses hold for unlimited tenants: their verbs, `exempt` and `observe`, act as `reserve` then, and if
    -- an earlier copy of the call joined the line in a pause. What replaces a grant has had its turn.
    local may_wait = r.unlimited and not r.replaces and (r.paused or joined_before)
    if may_wait and (op == 'exempt' or op == 'observe') then op = 'reserve' end
  end
  if failed and op ~= 'leave' then
    reply[n + 1], reply[n + 2] = 'failed', failed
    n = n + 2
    outcomes[number] = 'f' .. NO_TIME
  else
    local needs_windows = op == 'reserve' or op == 'exempt' or op == 'observe' or op == 'peek' or
      op == 'cancel' or op == 'expect'
    local verb = verbs[op] or made_once(extras, call).verb(op)
    local fits = op == 'reserve' and not repeated and reserve_fits or {}
    local status, decided, answer
    if r.lost then r.known = last_record end
    if done_before then
      status, decided = 'ok', unpack7(repeated, in_record + 1)
    elseif joined_before and not (call.line and call.line.flow_name(r.ticket)) then -- taken since
      status, decided, answer = 'joined', now, {time = now}
    else
      if r.replaces then made_once(extras, call).replace(r, list, now) end
      status, decided, answer = verb(r, list, now, fits, joined_before)
    end

    outcomes[number] = sub(status, 1, 1) .. (status == 'ok' and pack7(decided) or NO_TIME)
    local text = ''
    if answer or r.old_costs or now > call.now then
      text = made_once(extras, call).fields(r, list, now, needs_windows and fits, answer or {time = decided})
    end
    reply[n + 1], reply[n + 2], reply[n + 3] = status, decided, text
    n = n + 3
    if needs_windows then
      for i = 1, nwindows do -- not scope by scope: to fill a list out of order costs more
        local algorithm, st = call.windows[i].algorithm, list[call.scope_of[i]].states[i]
        reply[n + 1], reply[n + 2] = st.used, algorithm.resets_at(st, now)
        n = n + 2
      end
    end
  end
end

scopes.write_all(call)
if call.line then call.line.finish() end
if call.dirty then redis.call('SET', call.P .. record_name, pack7(seq) .. concat(outcomes), 'PX', RECORD_MS) end
return reply
