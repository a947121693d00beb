-- scope.lua: the value of one scope, which has all windows that are counted by the same attributes.
--
--   value    format(1) last(7) section*
--   section  expires(7) length of payload(3) length of label(1) label payload; a window's label: its name and kind(1)
--
-- `last` is the Redis time of the newest change: time never runs backwards from it. Sections that are not windows of
-- this policy are kept in scope.sections, by label, until they expire. Labels that begin with "!" are upstream.lua's.
-- The others are windows that only an older or a newer policy has: their counts stay. If a window's period has changed,
-- the period of the call's policy counts. Units that a call with a shorter period has dropped stay lost.
--
-- algorithms[kind], each in a file of its own, is a table of
--   load(p1, p2, p3, p4, now, data, from, to) -> st, clock_off: the state at `now`, from parameters and the payload, if
--     there is one: data[from .. to]; nil if that is malformed. clock_off: st is a guess, as the ticks of a
--     calendar that were sent do not enclose `now`
--   fits_at(st, now, cost, ahead, each) -> time >= now: the earliest one (for leases an upper bound) from which on
--     `cost` fits if `ahead` units go first, in tickets of `each` units (1 if unknown)
--   charge(st, now, cost, hold, id): counts `cost` units; reservation `id` may hold them for `hold`
--   give_back(st, now, at, cost, id): gives back units that were taken at `at` and still count
--   resets_at(st, now) -> time: when no unit is counted any more
--   payload(st, now) -> bytes, or three strings that the caller joins, as every copy of a long string costs time
-- and, where the algorithm has them:
--   opens_at(st, now) -> time: when a full window may have room, if nothing is given back until then
--   release(st, now, at, cost, id) -> units: ends a lease, as its holder has ended; 0 if there is none
--   renew(st, now, cost, id, waits) -> units: begins a lease anew, after its end only if there is room and nobody
--     waits; 0 if it does not
--   kept_until(st, now) -> time: until when the state is of use, if that is later than resets_at
--   grants(st, at) -> text: the grants at `at` or later: "TIME/UNITS,..."
--   drains: true if room comes back evenly: line_eta.lua assumes that no room stays unused
-- A state, besides what only its algorithm uses, has
--   limit, used           the most units that ever fit, and those that count
--   period                with a rate: the us in which it grants `limit` units
--   stated, every         with a rate: the policy's period, and the us of a unit; load_window adds what load leaves out
--   resets, margin, gap, lease, hold   see fixed.lua, concurrency.lua; present: see `later`

local scopes
do

local FORMAT = '\1'

-- load_window reads a window's state from its payload, if there is one, by the policy's parameters or the tenant's own.
local function load_window(scope, i, data, from, to)
  local window, settings = scope.call.windows[i], scope.settings
  local p1, p2, p3 = window.p1, window.p2, window.p3
  settings = settings and settings.windows[window.label]
  if settings then p1, p2, p3 = settings[1], settings[2], settings[3] end
  local st, clock_off = window.algorithm.load(p1, p2, p3, window.p4, scope.now, data, from, to)
  if clock_off then
    scope.failed = 'SLUICE_CLOCK window ' .. window.name .. ': the time of Redis is not among the ticks that were sent'
  end
  if st and st.period then st.stated, st.every = st.stated or st.period, st.period / st.limit end
  scope.states[i] = st
  return st
end

-- parse reads the value's sections into the windows' states. It returns false for a malformed value.
local function parse(scope, raw)
  local len, windows = #raw, scope.call.windows
  if len < 8 or sub(raw, 1, 1) ~= FORMAT then return false end
  local last, i = unpack7(raw, 2), 9
  if last > scope.now then scope.now = last end
  while i <= len do
    local high, mid, low, label_size = byte(raw, i + 7, i + 10)
    local from = label_size and i + 11 + label_size -- where the payload begins
    local to = from and from + high * 65536 + mid * 256 + low - 1
    if not to or to > len then return false end
    local expires = unpack7(raw, i)
    if expires > scope.now then
      local label, number = sub(raw, i + 11, from - 1), nil
      for _, j in ipairs(scope.spec.windows) do
        if windows[j].label == label then number = j end
      end
      if not number then
        scope.sections = scope.sections or {}
        scope.sections[label] = {expires = expires, payload = sub(raw, from, to)}
      elseif not load_window(scope, number, raw, from, to) then
        return false
      end
    end
    i = to + 1
  end
  return true
end

-- reload loads the states again, as of a later time or by other parameters.
local function reload(scope, now)
  local earlier, call = scope.now, scope.call
  scope.now, call.generation = now, call.generation + 1
  for _, i in ipairs(scope.spec.windows) do
    local st, algorithm = scope.states[i], call.windows[i].algorithm
    local kept = (algorithm.kept_until or algorithm.resets_at)(st, earlier)
    local payload = kept > earlier and concat({algorithm.payload(st, earlier)})
    load_window(scope, i, payload, 1, payload and #payload)
  end
end

-- read reads the values of keys that are not known yet into call.raw, by one command. Most are values of scopes.
local function read(call, suffixes)
  local P, raw, unread, keys, n = call.P, call.raw, {nil}, {nil}, 0
  for i = 1, #suffixes do
    local suffix = suffixes[i]
    if raw[suffix] == nil then
      n = n + 1
      raw[suffix], unread[n], keys[n] = false, suffix, P .. suffix
    end
  end
  if n == 0 then return end
  local values = redis.call('MGET', unpack(keys))
  for i = 1, n do raw[unread[i]] = values[i] end
end

-- open(call, suffix, number, settings) -> the scope of that key, as a table:
--   spec, suffix   call.scopes[number], and the end of its key
--   settings       the tenant's own parameters, or nil: only scopes of the tenant have them
--   states, now    the windows' states by their numbers, and their time
--   changed        whether it has to be written
--   sections       see above; nil without any. By label: {expires, payload}, with `state` once upstream.lua uses it
--   failed         why no request may use it. Few have it, or `ahead` (line_take.lua): a ninth field doubles the table
local function open(call, suffix, number, settings)
  local scope, spec = call.open[suffix], call.scopes[number]
  if not spec.of_tenant then settings = nil end
  if scope then -- opened before, maybe by other settings
    if scope.settings ~= settings then
      scope.settings = settings
      reload(scope, scope.now)
    end
    return scope
  end
  if call.raw[suffix] == nil then read(call, {suffix}) end
  local raw = call.raw[suffix]
  scope = {
    call = call, suffix = suffix, spec = spec, settings = settings, now = call.now, states = {nil, nil},
    changed = false, sections = nil,
  }
  call.open[suffix] = scope
  if raw and not parse(scope, raw) then
    scope.failed = 'SLUICE_STATE key ' .. call.P .. suffix .. ': is damaged, or of a newer release'
  end
  for _, i in ipairs(spec.windows) do
    if not scope.states[i] then load_window(scope, i, nil) end
  end
  return scope
end

-- section returns a section up to `first`, the first part of its payload, which has `size` bytes in all.
local function section(expires, label, first, size)
  local low, mid = size % 256, size % 65536
  return pack7(expires) .. char((size - mid) / 65536, (mid - low) / 256, low, #label) .. label .. first
end

-- write writes the sections that have not expired. The key lives as long as the last of them, and 1 ms more,
-- as Redis counts a TTL from the millisecond in which the script began.
local parts = {nil, nil, nil, nil, nil, nil, nil, nil} -- of a value
local function write(call, scope)
  local now, expires, windows, numbers, n = scope.now, 0, call.windows, scope.spec.windows, 1
  parts[1] = FORMAT .. pack7(now)
  for j = 1, #numbers do
    local window, st = windows[numbers[j]], scope.states[numbers[j]]
    local algorithm = window.algorithm
    local kept = (algorithm.kept_until or algorithm.resets_at)(st, now)
    if kept > now then
      local first, middle, last = algorithm.payload(st, now)
      n = n + 1
      parts[n] = section(kept, window.label, first, #first + (middle and #middle + #last or 0))
      if middle then
        parts[n + 1], parts[n + 2] = middle, last
        n = n + 2
      end
      if kept > expires then expires = kept end
    end
  end
  if scope.sections then
    for label, s in pairs(scope.sections) do
      if s.expires > now then
        n = n + 1
        local payload = s.state and write_fields(s.state) or s.payload
        parts[n] = section(s.expires, label, payload, #payload)
        expires = max(expires, s.expires)
      end
    end
  end
  local key = call.P .. scope.suffix
  if n == 1 then return redis.call('DEL', key) end -- no section is left
  local ms = format('%d', ceil((expires - call.now) / 1000) + 1)
  redis.call('SET', key, concat(parts, '', 1, n), 'PX', ms)
end

scopes = {
  open = open,
  read = read,
  reload = reload,

  -- later returns copies of scopes as they will be at a time without new grants; `present` is the state of leases now.
  later = function(list, time)
    local copies = {}
    for s = 1, #list do
      local copy = {}
      for name, value in pairs(list[s]) do copy[name] = value end
      copy.states = {}
      for i, st in pairs(list[s].states) do copy.states[i] = st end
      reload(copy, time)
      for i, st in pairs(list[s].states) do copy.states[i].present = st.present or st.lease and st end
      copies[s] = copy
    end
    return copies
  end,

  write_all = function(call)
    for _, scope in pairs(call.open) do
      if scope.changed then write(call, scope) end
    end
  end,
}
end
