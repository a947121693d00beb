-- windows.lua: from KEYS and ARGV to the windows of one call, and back to Redis and the caller.
--
-- Every script's ARGV ends in nine values a window, from ARGV[WINDOWS] on:
--   scope (its place in KEYS), name, kind, cost (units), p1, p2, p3, p4 (see the kind's file), unit
--
-- algorithms[kind] is a table of
--   readable(payload) -> whether the bytes have the shape that load expects
--   load(w, payload, now) -> st         reads the parameters and the state as it is at `now`
--   fits_at(w, st, now, from, cost, ahead) -> time >= from, the earliest at which `cost` units fit
--                                       if `ahead` units go first; reads only
--   opens_at(w, st, now) -> time        if there: the next look at a full window, if nothing is given back before
--   take(w, st, now, cost, hold)        counts `cost` units, which may be held for `hold`
--   give_back(w, st, now, at, cost) -> units, at most what was taken at `at` and still counts
--   capacity(w) -> units, the most that ever fit
--   release(w, st, now, at, cost) -> units, and renew(w, st, now, cost, held) -> units: if there, what is
--                                       held by a lease is given back, or kept for as long again
--   used(w, st) -> units                resets_at(w, st, now) -> when nothing counts any more
--   kept_until(w, st, now) -> time      if there: until when the state is of use, if that is longer
--   payload(w, st, now) -> bytes

local STRIDE = 9

-- The clock: Redis's own, unless a test hands one in.
local function clock(handed)
  local time = tonumber(handed)
  if time > 0 then return time end
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000000 + tonumber(t[2])
end

-- What is stored of a window. What another algorithm left under its name cannot be read: the
-- window then starts empty.
local function payload_of(scope, w, now)
  local at = scope.at[w.name]
  local section = at and scope.sections[at]
  return section and section.kind == w.kind and section.expires > now and section.payload
end

-- When the call of a nonce was granted, by what is stored of it: "AT", and behind that, after blanks,
-- the nonce of its last settle, and whether it was released; or that it was cancelled. Nil if it was
-- not granted, or that is not known any more.
local function granted_at(value) return value and tonumber(string.match(value, '^%d+') or '') end

-- A line's count is kept with the number of the line's format, in units of this.
local LINE_FORMAT, FORMATS = 1, 1000000000000
local function readable_line(count) return floor((tonumber(count) or 0) / FORMATS) == LINE_FORMAT end

-- How many units of a scope are kept free for tickets that were called (line.lua).
local function held_units(scope, unit, now)
  local at = scope.at['/' .. unit]
  local section = at and scope.sections[at]
  return section and section.expires > now and unpack7(section.payload, 1) or 0
end

-- The last parameter may be a list, which is no number.
local function parameter(s) return tonumber(s) or s end

local clock_said = 0 -- which may be behind `now`

-- open_windows(values, nscopes, real, first) -> windows, scopes, now; or nil and an error reply.
local function open_windows(values, nscopes, real, first)
  local scopes, now = {}, real
  clock_said = real
  for i = 1, nscopes do
    local scope, why = parse_scope(values[i])
    if not scope then
      return nil, redis.error_reply('SLUICE_STATE key ' .. KEYS[i] .. ': ' .. why)
    end
    -- MGET says of a list or a hash that it is nil.
    if not values[i] and redis.call('EXISTS', KEYS[i]) == 1 then
      return nil, redis.error_reply('SLUICE_STATE key ' .. KEYS[i] .. ': not a string')
    end
    scopes[i] = scope
    now = max(now, scope.last)
  end
  local windows, n = {}, 0
  for i = first, nscopes > 0 and #ARGV or 0, STRIDE do
    local kind = ARGV[i + 2]
    local w = {
      scope = scopes[tonumber(ARGV[i])], name = ARGV[i + 1], kind = kind, algorithm = algorithms[kind],
      cost = tonumber(ARGV[i + 3]),
      p1 = tonumber(ARGV[i + 4]), p2 = tonumber(ARGV[i + 5]), p3 = tonumber(ARGV[i + 6]), p4 = parameter(ARGV[i + 7]),
      unit = ARGV[i + 8],
    }
    local payload = payload_of(w.scope, w, now)
    if payload and not w.algorithm.readable(payload) then
      return nil, redis.error_reply('SLUICE_STATE key ' .. KEYS[tonumber(ARGV[i])] .. ': window ' .. w.name .. ' is damaged')
    end
    w.state = w.algorithm.load(w, payload, now)
    if w.state.refused then
      return nil, redis.error_reply('SLUICE_CLOCK window ' .. w.name .. ': the time of Redis is not among the ticks that were sent')
    end
    n = n + 1
    windows[n] = w
  end
  return windows, scopes, now
end

-- fits_window is fits_at of one window, and of what the far side said of its scope: a pause is also for
-- what costs nothing here.
local function fits_window(w, now, from, cost, ahead)
  local time = cost > 0 and w.algorithm.fits_at(w, w.state, now, from, cost, ahead) or from
  if w.scope.told then time = told_fits_at(w, now, time, cost, ahead) end
  return time
end

-- fits_at(windows, now) -> the earliest time at which the costs of all windows fit together,
-- and leaves in every window's `fits` when it would fit alone, or 0 for at once.
-- A later time can be worse for a window that closes at times: hence the repetition. It is
-- bounded: windows that are almost never open together get a time to look again.
local function fits_at(windows, now)
  local time = now
  for _, w in ipairs(windows) do
    local fits = fits_window(w, now, now, w.cost, 0)
    w.fits = fits > now and fits or 0
    time = max(time, fits)
  end
  local from = now
  for _ = 1, 100 do
    if time == from then break end
    from = time
    for _, w in ipairs(windows) do
      time = max(time, fits_window(w, now, from, w.cost, 0))
    end
  end
  return time
end

local function put_window(w, now)
  local kept_until = w.algorithm.kept_until or w.algorithm.resets_at
  put_section(w.scope, w.name, w.kind, kept_until(w, w.state, now), w.algorithm.payload(w, w.state, now))
end

local function save(windows, scopes, now, real)
  for _, w in ipairs(windows) do
    put_window(w, now)
  end
  for i, scope in ipairs(scopes) do
    write_scope(KEYS[i], scope, now, real)
  end
end

-- reply(status, at, time, windows, now): four integers, then used, fits and resets for every
-- window, whose states are those of `now`.
local function reply(status, at, time, windows, now)
  local out, n = {status, at, time, now - clock_said}, 4
  for _, w in ipairs(windows) do
    out[n + 1] = w.algorithm.used(w, w.state)
    out[n + 2] = w.fits
    out[n + 3] = w.algorithm.resets_at(w, w.state, now)
    n = n + 3
  end
  return out
end
