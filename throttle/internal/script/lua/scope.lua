-- scope.lua: the value of one scope: all windows that are counted by the same attributes.
--
--   value    format(1) last(7) section*
--   section  length of name(1) name kind(1) expires(7) length of payload(3) payload
--
-- `last` is the Redis time of the newest change: time never runs backwards from it.
-- Sections that this call does not know (a window of an older or a newer policy) are
-- carried along until they expire, so workers of two releases never erase each other's counts.
-- Names that no window can have ("!...") belong to the upstream (upstream.lua).
--
-- algorithms[kind], the file of each, is a table of
--   readable(payload) -> whether the bytes have the shape that load expects
--   load(p1, p2, p3, p4, payload, now) -> st
--                                  the state at `now`, from the parameters and the bytes (or nil)
--   fits_at(st, now, from, cost, ahead, each) -> time >= from
--                                  the earliest time at which `cost` units fit if `ahead` units go
--                                  first, in tickets of `each` (1: any); it only reads
--   take(st, now, cost, hold, id)  counts `cost` units; reservation `id` may hold them for `hold`
--   give_back(st, now, at, cost, id) -> units
--                                  gives back what was taken at `at` and still counts
--   capacity(st) -> units          the most that ever fit
--   used(st) -> units              what is counted
--   resets_at(st, now) -> time     when nothing is counted any more
--   payload(st, now) -> bytes
-- and, where the algorithm has them:
--   rid_at(st, start, units) -> time
--                                  when a cost fits that did not fit beside a ticket granted at
--                                  `start`, if no more than `units` were granted since, it included
--   span(st) -> us, margin, counts the longest time between two resets, for how long before one
--                                  nothing is granted, and in how many spans a grant may count
--   opens_at(st, now) -> time      the next look at a full window, if nothing is given back before
--   release(st, now, at, cost, id) -> units, and renew(st, now, cost, id) -> units
--                                  what is held by a lease is given back, or kept for as long again
--   kept_until(st, now) -> time    how long the state is of use, if that is longer than resets_at
--   longest(window) -> seconds     how long a line may have to wait for the window

local scopes
do
local byte, char, sub, format, ceil = string.byte, string.char, string.sub, string.format, math.ceil
local pack7, unpack7 = codec.pack7, codec.unpack7

local FORMAT = 1

-- fail notes why nothing can be decided about a scope.
local function fail(scope, reason)
  scope.failed = 'SLUICE_STATE key ' .. scope.call.P .. scope.suffix .. ': ' .. reason
end

-- load_window makes a window's state of its bytes, by the policy's parameters or the tenant's own.
local function load_window(scope, i, payload)
  local window = scope.call.windows[i]
  local algorithm, own = window.algorithm, scope.own and scope.own[window.name]
  if payload and not algorithm.readable(payload) then
    fail(scope, 'window ' .. window.name .. ' is damaged')
    payload = nil
  end
  local st
  if own then
    st = algorithm.load(own[1], own[2], own[3], window.p4, payload, scope.now)
  else
    st = algorithm.load(window.p1, window.p2, window.p3, window.p4, payload, scope.now)
  end
  if st.refused then
    scope.failed = 'SLUICE_CLOCK window ' .. window.name ..
      ': the time of Redis is not among the ticks that were sent'
  end
  scope.states[i] = st
end

-- counts tells whether the scope has a window of that name.
local function counts(scope, name)
  for _, i in ipairs(scope.of.windows) do
    if scope.call.windows[i].name == name then return true end
  end
  return false
end

-- parse reads the value's sections into the windows' states. scope.failed says what it cannot read.
local function parse(scope, raw)
  local len, heads = #raw, scope.of.heads
  if byte(raw, 1) ~= FORMAT then
    fail(scope, 'format ' .. (byte(raw, 1) or 'none') .. ' is not ' .. FORMAT)
    return
  elseif len < 8 then
    fail(scope, 'value cut short')
    return
  end
  local last, i = unpack7(raw, 2), 9
  if last > scope.now then scope.now = last end
  while i <= len do
    local kind = i + byte(raw, i) + 1
    local a, b, c = byte(raw, kind + 8, kind + 10)
    local ends = c and kind + 10 + a * 65536 + b * 256 + c
    if not ends or ends > len then
      fail(scope, 'section cut short')
      return
    end
    local expires = unpack7(raw, kind + 1)
    if expires > scope.now then
      local at = heads[sub(raw, i, kind)]
      if at then
        load_window(scope, at, sub(raw, kind + 11, ends))
      else
        if byte(raw, i + 1) == 33 then -- '!'
          scope.upstream = scope.upstream or {}
          scope.upstream[sub(raw, i + 1, kind - 1)] = {
            kind = sub(raw, kind, kind), expires = expires, payload = sub(raw, kind + 11, ends),
          }
        elseif not counts(scope, sub(raw, i + 1, kind - 1)) then
          -- A window of this name has another algorithm now: it starts empty, and the section goes.
          scope.others = scope.others or {}
          scope.others[#scope.others + 1] = {expires = expires, bytes = sub(raw, i, ends)}
        end
      end
    end
    i = ends + 1
  end
end

-- reload brings the states to a later time, or to other parameters.
local function reload(scope, now)
  local windows, list = scope.call.windows, scope.of.windows
  local before = scope.now
  scope.now = now
  for j = 1, #list do
    local i = list[j]
    local st, algorithm = scope.states[i], windows[i].algorithm
    local payload = algorithm.payload(st, before)
    if algorithm.resets_at(st, before) <= before and not algorithm.kept_until then payload = nil end
    load_window(scope, i, payload)
  end
end

-- open(call, suffix, number, own) -> the scope of that key, with the windows' states. number is its
-- place in the policy. own are the tenant's own parameters by window, or nil: they hold where the
-- scope contains the tenant.
local function open(call, suffix, number, own)
  local scope, of = call.open[suffix], call.scopes[number]
  if not of.of_tenant then own = nil end
  if scope then
    if scope.own ~= own then
      scope.own = own
      reload(scope, scope.now)
    end
    return scope
  end
  local raw, read = call.raw[suffix], true
  if raw == nil then raw, read = redis.call('MGET', call.P .. suffix)[1], false end
  -- Eight fields: a ninth, which few scopes get, makes a table twice as large.
  scope = {
    call = call, suffix = suffix, of = of, own = own, now = call.now, states = {false, false},
    changed = false, upstream = nil,
  }
  call.open[suffix] = scope
  if raw then
    parse(scope, raw)
  elseif not read and redis.call('EXISTS', call.P .. suffix) == 1 then
    fail(scope, 'not a string')
  end
  local list, states = of.windows, scope.states
  for j = 1, #list do
    if not states[list[j]] then load_window(scope, list[j], nil) end
  end
  return scope
end

-- keep keeps the values of scopes for open. They begin at `from`, as their keys do. MGET says of a
-- list or a hash that there is no value: open looks again if one of them may be that.
local function keep(call, suffixes, keys, values, from)
  local raw, missing, n = call.raw, {}, 0
  for i = 1, #suffixes do
    local value = values[from + i - 1]
    raw[suffixes[i]] = value
    if not value then
      n = n + 1
      missing[n] = keys[from + i - 1]
    end
  end
  if n > 0 and redis.call('EXISTS', unpack(missing)) > 0 then
    for i = 1, #suffixes do raw[suffixes[i]] = values[from + i - 1] or nil end
  end
end

-- read reads the values of scopes that will be opened, in one call.
local function read(call, suffixes)
  local n = #suffixes
  if n < 2 then return end
  local P, keys = call.P, {}
  for i = 1, n do keys[i] = P .. suffixes[i] end
  keep(call, suffixes, keys, redis.call('MGET', unpack(keys)), 1)
end

-- section returns what goes before a payload. Long strings are only joined once, in the end: every
-- byte of a new one costs time.
local function section(head, expires, size)
  local high, middle = (size - size % 65536) / 65536, (size - size % 256) / 256 % 256
  return head .. pack7(expires) .. char(high, middle, size % 256)
end

-- write writes the sections that have not expired, with the TTL of the last one. Redis counts a TTL
-- from the millisecond in which the script began: one more is never too early.
local before, before_at, ttl, ttl_ms -- the last value's beginning and TTL: a batch's are alike
local function write(call, scope)
  local now, expires, windows, list = scope.now, 0, call.windows, scope.of.windows
  local key = call.P .. scope.suffix
  if before_at ~= now then before, before_at = char(FORMAT) .. pack7(now), now end
  local parts, n = {before, '', '', '', ''}, 1 -- made for two windows, as it is slow to grow
  for j = 1, #list do
    local window, st = windows[list[j]], scope.states[list[j]]
    local algorithm = window.algorithm
    local kept = (algorithm.kept_until or algorithm.resets_at)(st, now)
    if kept > now then
      local payload = algorithm.payload(st, now)
      parts[n + 1], parts[n + 2] = section(window.head, kept, #payload), payload
      n = n + 2
      if kept > expires then expires = kept end
    end
  end
  if scope.upstream then
    for name, s in pairs(scope.upstream) do
      if s.expires > now then
        parts[n + 1], parts[n + 2] = section(char(#name) .. name .. s.kind, s.expires, #s.payload), s.payload
        n = n + 2
        if s.expires > expires then expires = s.expires end
      end
    end
  end
  if scope.others then
    for _, s in ipairs(scope.others) do
      if s.expires > now then
        n = n + 1
        parts[n] = s.bytes
        if s.expires > expires then expires = s.expires end
      end
    end
  end
  if n == 1 then
    redis.call('DEL', key)
  else
    local ms = ceil((expires - call.now) / 1000) + 1
    if ttl_ms ~= ms then ttl, ttl_ms = format('%d', ms), ms end
    redis.call('SET', key, table.concat(parts, '', 1, n), 'PX', ttl)
  end
end

scopes = {
  open = open,
  keep = keep,
  read = read,
  reload = reload,

  -- touch notes that a scope has to be written; it then stands at `now`.
  touch = function(scope, now)
    if now > scope.now then reload(scope, now) end
    scope.changed = true
  end,

  write_all = function(call)
    for _, scope in pairs(call.open) do
      if scope.changed then write(call, scope) end
    end
  end,
}
end
