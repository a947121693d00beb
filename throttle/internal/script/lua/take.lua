-- take.lua: takes from a policy's line the next tickets that fit now, in line order, and charges them in all windows.
--
-- KEYS and the beginning of ARGV: windows.lua. Then
--   1 most      how many tickets, 0 to 64
--   2 id_base   14 hex digits: a reservation's id is these and 2 more, its ticket's number from 1
--   3 queues    how many; 0: the last take is acknowledged, and nothing is taken
--   4 strict    1 if their priorities are strict, else 0
--   then the queues, the most important first, each as "priority queue"
-- reply at, next, id_base, then for each ticket its text, when it was granted (us), and what each window has counted:
--   next   when to ask again (us): `at`, the time of the reply, for at once; 0: nobody waits in these queues
--   text   "ticket rankcosts values key tenant status", in the middle the record of line.lua. The status is 'granted',
--          'never' if it never fits, or 'uncharged': it joined when the policy had not all its scopes, or by now its
--          tenant is exempt or the policy observes. If it joined by scopes that the policy has not,
--          ":SUFFIX+SUFFIX..." follows: all of its scopes
--
-- Taken tickets are kept until the next call of the process acknowledges them. The same call, repeated, gets the same
-- tickets, with the time of now, and zeros for the counts of windows; if it took none, `next` is now. Tickets that are
-- not acknowledged for 5 s are put back by the next take of another process. The number of the last call is kept
-- for a minute: a late copy of a call takes nothing.
--
-- Keys: k and k:PROCESS (line.lua). The latter begins with seq(7) at(7) next(7) id_base(14). Then come for each
-- ticket "TEXT weight suffixes;settings", a tab and when it was granted unless that is `at`, and an end of line.

local call = read_policy()
local LOST = 5000000   -- us after which a take counts as lost
local PUT_BACK = '4'   -- the most lost takes that one call puts back
local TICKETS = 35     -- bytes of a record before its tickets

local P, now, first = call.P, call.now, 7
local process, seq = ARGV[2], ARGV[3] + 0
local most, id_base, nqueues, strict = unpack(ARGV, first, first + 3)
local record_key = P .. 'k:' .. process
call.waiting = redis.call('GET', P .. 'q')

-- remember writes the record of this call: its beginning, as parts[1], and its tickets, in the parts from 2 on.
local function remember(next_time, parts, ttl)
  parts[1] = pack7(seq) .. pack7(now) .. pack7(next_time) .. id_base
  redis.call('SET', record_key, concat(parts), 'PX', ttl)
end

-- Tickets are long: of the last take's record only the beginning is read, and one byte, which tells if it took some.
local beginning = redis.call('GETRANGE', record_key, '0', TICKETS) -- it counts from 0
local took_some, last_seq, appointment = #beginning > TICKETS, 0, 0
if beginning ~= '' then last_seq, appointment = unpack7(beginning, 1), unpack7(beginning, 15) end
if last_seq > seq then return {now, 0, id_base} end -- this is a late copy: its caller has given up
if last_seq == seq then -- this is a repeated call
  if not took_some then return {now, now, id_base} end -- ask at once
  local taken_at, out = unpack7(beginning, 8), {now, appointment, sub(beginning, 22, TICKETS)}
  local tickets = redis.call('GETRANGE', record_key, TICKETS, '-1')
  for text, at in gmatch(tickets, '(%S+ %S+ %S+ %S+ %S+ %S+)[^\n\t]*\t?(%d*)\n') do
    out[#out + 1], out[#out + 2] = text, at == '' and taken_at or at + 0
    for _ = 1, #call.windows do out[#out + 1] = 0 end
  end
  return out
end
if took_some then redis.call('ZREM', P .. 'k', process) end -- this call acknowledges its tickets

if not call.waiting and redis.call('EXISTS', P .. 'k') == 0 then
  remember(0, {}, RECORD_MS)
  return {now, 0, id_base}
end
call.id_base = id_base
local files = made_once(made_once(extras, call).line_files, call)
local L = files.new_line(call)
local T = files.new_take(L)
local lost_at = format('%d', now - LOST)
for _, other in ipairs(redis.call('ZRANGEBYSCORE', P .. 'k', '-inf', lost_at, 'LIMIT', '0', PUT_BACK)) do
  local record = redis.call('GET', P .. 'k:' .. other)
  if record then T.restore(record) end
  redis.call('ZREM', P .. 'k', other)
  redis.call('DEL', P .. 'k:' .. other)
end

local queues, taken = {}, {now, 0, id_base, n = 0, kept = {''}} -- the reply, and the parts of the record
for i = 1, nqueues + 0 do
  local priority, name = match(ARGV[first + 3 + i], '^(%d+) (.*)$')
  queues[i] = {name = name, priority = priority + 0}
end
taken[2] = T.take(queues, strict == '1', most + 0, appointment, taken)
scopes.write_all(call)
L.finish()
-- Tickets that nobody acknowledges are put back, but not claims: their process is gone then.
local may_be_lost = taken.n > 0 and not L.queue_of(queues[1].name).claims
remember(taken[2], taken.kept, may_be_lost and L.ttl .. '000' or RECORD_MS)
if may_be_lost then
  redis.call('ZADD', P .. 'k', format('%d', now), process)
  redis.call('EXPIRE', P .. 'k', L.ttl)
end
return taken
