-- state.lua: the value of one scope, which holds all of the scope's windows.
--
--   value    format(1) last(7) section*
--   section  length of name(1) name kind(1) expires(7) length of payload(3) payload
--
-- `last` is the Redis time of the newest change: time never runs backwards from it.
-- Sections that this call does not know (a window of an older or a newer policy) are
-- carried along until they expire, so workers of two releases never erase each other's counts.
-- Names that no window can have belong to the line (line.lua) and to the far side (told.lua).
-- Integers are big-endian. All times are microseconds since 1970, all lengths bytes.

local FORMAT = 1

local byte, char, sub, find = string.byte, string.char, string.sub, string.find
local floor, ceil, min, max = math.floor, math.ceil, math.min, math.max

-- Doubles hold every integer up to here. Only exempt tenants can count so far: no further.
local MOST = 9007199254740992

-- A 7-byte integer, 0 <= n < 2^56.
local function pack7(n)
  local hi = floor(n / 16777216)
  local lo = n - hi * 16777216
  local top = floor(hi / 65536)
  local mid = hi - top * 65536
  return char(floor(top / 256), top % 256, floor(mid / 256), mid % 256,
    floor(lo / 65536), floor(lo / 256) % 256, lo % 256)
end

local function unpack7(s, i)
  local a, b, c, d, e, f, g = byte(s, i, i + 6)
  return ((((((a * 256 + b) * 256 + c) * 256 + d) * 256 + e) * 256 + f) * 256) + g
end

-- A 5-byte integer: units.
local function pack5(n)
  local hi = floor(n / 65536)
  local lo = n - hi * 65536
  return char(floor(hi / 65536), floor(hi / 256) % 256, hi % 256, floor(lo / 256), lo % 256)
end

local function unpack5(s, i)
  local a, b, c, d, e = byte(s, i, i + 4)
  return (((a * 256 + b) * 256 + c) * 256 + d) * 256 + e
end

local function pack3(n)
  return char(floor(n / 65536), floor(n / 256) % 256, n % 256)
end

-- parse_scope(raw) -> {last, sections, at, told}, or nil and why not.
-- sections is a list of {name, kind, expires, payload}; at maps a name to its place in it; told says
-- that the far side said something.
local function parse_scope(raw)
  local scope = {last = 0, sections = {}, at = {}}
  if not raw then return scope end
  if byte(raw, 1) ~= FORMAT then
    return nil, 'format ' .. (byte(raw, 1) or 'none') .. ' is not ' .. FORMAT
  end
  local len = #raw
  if len < 8 then return nil, 'value cut short' end
  scope.last = unpack7(raw, 2)
  local i, n = 9, 0
  while i <= len do
    local l = byte(raw, i)
    local head = i + l + 1
    if head + 10 > len then return nil, 'section cut short' end
    local name = sub(raw, i + 1, i + l)
    local a, b, c = byte(raw, head + 8, head + 10)
    local size = a * 65536 + b * 256 + c
    if head + 10 + size > len then return nil, 'payload cut short' end
    n = n + 1
    scope.sections[n] = {
      name = name,
      kind = sub(raw, head, head),
      expires = unpack7(raw, head + 1),
      payload = sub(raw, head + 11, head + 10 + size),
    }
    scope.at[name] = n
    if byte(name) == 33 then scope.told = true end -- '!'
    i = head + 11 + size
  end
  return scope
end

-- put_section(scope, name, kind, expires, payload) replaces or adds one section.
local function put_section(scope, name, kind, expires, payload)
  local n = scope.at[name]
  if not n then
    n = #scope.sections + 1
    scope.at[name] = n
  end
  scope.sections[n] = {name = name, kind = kind, expires = expires, payload = payload}
end

-- write_scope(key, scope, now, real) writes what has not expired, and lets Redis forget it
-- at its own time `real` plus what the longest-lived section still needs. Redis counts that from
-- the millisecond in which the script began: one more is never too early.
local function write_scope(key, scope, now, real)
  local parts, n, expires = {char(FORMAT), pack7(now)}, 2, 0
  for _, s in ipairs(scope.sections) do
    if s.expires > now then
      parts[n + 1] = char(#s.name) .. s.name .. s.kind .. pack7(s.expires) .. pack3(#s.payload)
      parts[n + 2] = s.payload
      n = n + 2
      expires = max(expires, s.expires)
    end
  end
  if n == 2 then
    redis.call('DEL', key)
  else
    redis.call('SET', key, table.concat(parts), 'PX', string.format('%.0f', ceil((expires - real) / 1000) + 1))
  end
end
