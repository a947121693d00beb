-- codec.lua: short names of Lua's own functions, `made_once`, and how numbers and fields are written. Integers are
-- big-endian. All times are microseconds since 1970. miniredis has neither struct nor bit, hence char and byte.
--
-- Redis keeps no function from one call to the next. So most files put theirs in one table. A closure costs each call
-- 400 instructions, a table of 8 names 3,000, and a local that a closure captures 500, unless another one has captured
-- it already. So the names below are shared by all files, few functions are made at every call, and `made_once` makes
-- the others when a call needs them. A new string costs 12 instructions a byte, as Redis's Lua hashes all of it. So
-- long strings are cut and joined once. Each time that a table grows costs 1,000. So tables begin with all their
-- fields, or with as many nil as they are to have. A call of a function costs 400.

local byte, char, sub, match, gmatch = string.byte, string.char, string.sub, string.match, string.gmatch
local find, format, concat = string.find, string.format, table.concat
local floor, ceil, min, max = math.floor, math.ceil, math.min, math.max

local MOST = 9007199254740992 -- doubles hold every integer up to it; only counts that no limit bounds can come near
local ROOT = 'w:' -- the key of the scope that all share: flows wait for handler slots there, even if it has no window

-- Algorithms are kept by their letters. extras(call) makes functions that not all calls need: see library.go.
local algorithms, extras = {}, nil

-- made_once returns the result of the first call of `make`: later calls ignore their arguments.
local made = {}
local function made_once(make, ...)
  local result = made[make]
  if not result then
    result = make(...)
    made[make] = result
  end
  return result
end

-- Fields are JSON. cjson reads them, but writes only 14 digits of a number.
local function write_fields(value)
  local lua_type = type(value)
  if lua_type == 'number' then return format('%d', value) end
  if lua_type ~= 'table' then return cjson.encode(value) end
  local parts, open, close = {}, '{', '}'
  if value[1] then
    open, close = '[', ']'
    for i = 1, #value do parts[i] = write_fields(value[i]) end
  else
    for name, field in pairs(value) do parts[#parts + 1] = '"' .. name .. '":' .. write_fields(field) end
  end
  return open .. concat(parts, ',') .. close
end

-- pack7 returns a 7-byte integer, 0 <= n < 2^56.
local function pack7(n)
  local low = n % 16777216          -- three bytes
  local high = (n - low) / 16777216 -- four bytes
  local low1, low2 = low % 256, low % 65536
  local high1, high2, high3 = high % 256, high % 65536, high % 16777216
  return char((high - high3) / 16777216, (high3 - high2) / 65536, (high2 - high1) / 256, high1,
    (low - low2) / 65536, (low2 - low1) / 256, low1)
end

local function unpack7(s, i)
  local a, b, c, d, e, f, g = byte(s, i, i + 6)
  return ((((((a * 256 + b) * 256 + c) * 256 + d) * 256 + e) * 256 + f) * 256) + g
end
