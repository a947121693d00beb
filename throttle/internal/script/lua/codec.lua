-- codec.lua: short names of Lua's own functions, `made_once`, and how numbers and fields are written. Integers are
-- big-endian. All times are microseconds since 1970. miniredis has neither struct nor bit, hence char and byte.
--
-- Redis keeps no function from one call of a script to the next. Making a closure costs 400 instructions, a table of 8
-- names 3,000, and each local that closures capture 500, once. So all files share the names below, most put their
-- functions in one table, and `made_once` makes what few calls need. A call of a function costs 400. A new
-- string costs 12 a byte, as Redis's Lua hashes all of it: long strings are cut and joined once. Each time that a table
-- grows costs 1,000: tables begin with all their fields, or with as many nil as they are to have.

local byte, char, sub, match, gmatch = string.byte, string.char, string.sub, string.match, string.gmatch
local find, format, concat = string.find, string.format, table.concat
local floor, ceil, min, max = math.floor, math.ceil, math.min, math.max

local MOST = 9007199254740992 -- 2^53: doubles hold every integer up to it. Only counts that no limit bounds come near
local ROOT = 'w:' -- the key of the scope that all share: flows wait for handler slots there, even if it has no window

local algorithms = {} -- by their letters: see scope.lua
local extras -- extras(call) makes functions that few calls need: see library.go

-- made_once calls make(...) at its first use, and from then on returns that result, whatever the arguments.
local made = {}
local function made_once(make, ...)
  if not made[make] then made[make] = make(...) end
  return made[make]
end

-- Fields are JSON. cjson reads them, but writes only 14 digits of a number.
local function write_fields(value)
  local lua_type = type(value)
  if lua_type == 'number' then return format('%d', value) end
  if lua_type ~= 'table' then return cjson.encode(value) end
  local parts = {}
  if value[1] then
    for i = 1, #value do parts[i] = write_fields(value[i]) end
    return '[' .. concat(parts, ',') .. ']'
  end
  for name, field in pairs(value) do parts[#parts + 1] = '"' .. name .. '":' .. write_fields(field) end
  return '{' .. concat(parts, ',') .. '}'
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
