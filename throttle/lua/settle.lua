-- settle.lua: what becomes of a reservation after it was granted.
--
-- KEYS  one value per scope, then the nonce of the reservation, then the count of the line
-- ARGV  1 now: microseconds, or 0 for the clock of Redis
--       2 what: "cancel" (gives everything back, once); "release" (gives back what is held by
--         leases); "renew" (keeps that for as long again); "settle" (corrects what was taken: the costs
--         are what has to be added to it, or given back if below 0); "pause" (the far side
--         refused it); "resume" (ends a pause); "left" (the far side said how much is left)
--       3 nonce_ttl: milliseconds for which a repeated call is recognised, at the least
--       4 line: as in reserve.lua
--       5 at: when the reservation was granted (us)
--       6 more: of a settle, its own nonce; of the far side's word, the scopes that it is about (their
--         places in KEYS, by commas)
--       7 word: of a pause, "wait ramp ramp_most" (us); of what is left, "unit units reset" (reset: us from now)
--       8.. nine values a window (windows.lua)
-- reply status: 0 nothing to do, or for a renewal some lease is lost; 1 done
--       at:     when this was decided (us)
--       time:   the same
--       behind: how far the clock is behind the windows, as in reserve.lua (us)
--       then for every window: used (units), given back or held (units), resets (us)
--       and if there is a line: when somebody must look again (us, 0 never), then the tickets called

local WINDOWS = 8
local CANCELLED, RELEASED = 'cancelled', ' released'

local values = redis.call('MGET', unpack(KEYS))
local real = clock(ARGV[1])
local windows, scopes, now = open_windows(values, #KEYS - 2, real, WINDOWS)
if not windows then return scopes end

local what, at, nonce = ARGV[2], tonumber(ARGV[5]), values[#KEYS - 1]
if at == 0 and what == 'left' then at = now end
local cancelled = nonce == CANCELLED
local released = nonce and sub(nonce, -#RELEASED) == RELEASED
-- The same nonce may have been granted anew since: that is another reservation.
local other = (granted_at(nonce) or at) ~= at
-- What was granted later than now, before a clock was set back, is in no state any more.
local counts = at <= now
local status, freed = 0, false
for _, w in ipairs(windows) do w.fits = 0 end

-- until_all is when nothing of the reservation is counted any more.
local function until_all()
  local time = now
  for _, w in ipairs(windows) do
    if w.cost ~= 0 then time = max(time, w.algorithm.resets_at(w, w.state, now)) end
  end
  return time
end

-- The nonce is remembered for as long as anything of the reservation would still be counted.
local function remember(value, time)
  local ttl = max(ceil((time - real) / 1000), tonumber(ARGV[3]))
  redis.call('SET', KEYS[#KEYS - 1], value, 'PX', string.format('%.0f', ttl))
end

if what == 'cancel' then
  if not cancelled and not other then
    local time = until_all()
    for _, w in ipairs(windows) do
      -- What a lease holds is not what was settled since.
      if counts and (w.cost > 0 or w.algorithm.release) then w.fits = w.algorithm.give_back(w, w.state, now, at, w.cost) end
    end
    save(windows, scopes, now, real)
    remember(CANCELLED, time)
    status, freed = 1, true
  end
elseif what == 'release' then
  local time = nonce and find(nonce, ' ', 1, true) and until_all() or now -- it was settled
  for _, w in ipairs(windows) do
    if w.algorithm.release then w.fits = w.algorithm.release(w, w.state, now, at, w.cost) end
    if w.fits > 0 then
      status, freed = 1, true
      time = max(time, now + w.lease) -- a renewal may still be on its way, or come
    end
  end
  if freed then
    save(windows, scopes, now, real)
    if not cancelled then remember((nonce or string.format('%.0f', at)) .. RELEASED, time) end
  end
elseif what == 'renew' then
  status = 1
  for _, w in ipairs(windows) do
    if w.algorithm.renew and w.cost > 0 then
      w.fits = (cancelled or released) and 0 or w.algorithm.renew(w, w.state, now, w.cost, held_units(w.scope, w.unit, now))
      if w.fits == 0 then status = 0 end
    end
  end
  save(windows, scopes, now, real)
elseif what == 'settle' then
  local own = ' ' .. ARGV[6]
  if not cancelled and not other and not (nonce and find(nonce, own, 1, true)) then
    local time = until_all()
    for _, w in ipairs(windows) do
      if w.cost > 0 then
        w.algorithm.take(w, w.state, now, w.cost, 0)
        freed = true -- whoever is first in a line may wait for this window now, and hold up nobody
      elseif w.cost < 0 and counts then
        w.fits = w.algorithm.give_back(w, w.state, now, at, -w.cost)
        freed = freed or w.fits > 0
      end
    end
    save(windows, scopes, now, real)
    remember(string.format('%.0f', at) .. own .. (released and RELEASED or ''), time)
    status = 1
  end
else
  local a, b, c = string.match(ARGV[7], '^(%S+) (%S+) (%S+)$')
  for place in string.gmatch(ARGV[6], '%d+') do
    local scope = scopes[tonumber(place)]
    if what == 'pause' then
      told_pause(scope, now, at, tonumber(a), tonumber(b), tonumber(c))
    elseif what == 'resume' then
      told_resume(scope)
    else
      told_left(scope, a, now, at, tonumber(b), now + tonumber(c))
    end
    write_scope(KEYS[tonumber(place)], scope, now, real)
  end
  status, freed = 1, true -- also by a pause: whoever is first in a line may wait elsewhere now, and hold up nobody
end
if not values[#KEYS] or not freed or not readable_line(values[#KEYS]) then return reply(status, now, now, windows, now) end
