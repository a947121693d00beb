-- codec.lua: numbers as bytes. Integers are big-endian. All times are microseconds since 1970.
-- miniredis has neither struct nor bit, hence string.byte and string.char.
--
-- Every file of a script puts its functions in one table. At every call of the script a closure
-- costs time, and so does each local that it captures, more if that stands far outside. Hence the
-- blocks, and the locals at their beginning.

local codec
do
local byte, char = string.byte, string.char

codec = {
  -- Doubles hold every integer up to here. Only what exempt tenants take can come near.
  MOST = 9007199254740992,

  -- A 7-byte integer, 0 <= n < 2^56.
  pack7 = function(n)
    local g = n % 256
    n = (n - g) / 256
    local f = n % 256
    n = (n - f) / 256
    local e = n % 256
    n = (n - e) / 256
    local d = n % 256
    n = (n - d) / 256
    local c = n % 256
    n = (n - c) / 256
    local b = n % 256
    return char((n - b) / 256, b, c, d, e, f, g)
  end,

  unpack7 = function(s, i)
    local a, b, c, d, e, f, g = byte(s, i, i + 6)
    return ((((((a * 256 + b) * 256 + c) * 256 + d) * 256 + e) * 256 + f) * 256) + g
  end,

  -- A 5-byte integer: units.
  pack5 = function(n)
    local e = n % 256
    n = (n - e) / 256
    local d = n % 256
    n = (n - d) / 256
    local c = n % 256
    n = (n - c) / 256
    local b = n % 256
    return char((n - b) / 256, b, c, d, e)
  end,

  unpack5 = function(s, i)
    local a, b, c, d, e = byte(s, i, i + 4)
    return (((a * 256 + b) * 256 + c) * 256 + d) * 256 + e
  end,
}
end
