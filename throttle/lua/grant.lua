-- grant.lua: reserve.lua for the most frequent call: nobody waits, and all windows are of the kinds s, f
-- and g. It stores and answers what reserve.lua would, in one pass without functions and tables for every
-- window, which cost more than the calls to Redis. Whatever is out of the ordinary it leaves to
-- reserve.lua: it then replies nil, and has changed nothing.
--
-- KEYS  as in reserve.lua
-- ARGV  1 now: microseconds, or 0 for the clock of Redis
--       2 what: "reserve"; nothing else has a short way
--       3 nonce_ttl: milliseconds for which a repeated call is recognised
--       4 waits: 1 if a request that does not fit waits, else 0
--       5.. for every scope how many windows it has, and for each of these five values: head (as
--         a section begins: length of name, name, kind), cost, p1, p2, p3 (of kind f twice the margin,
--         and 1 more if it begins at first use)
-- reply as in reserve.lua, of the status 0 or 1, with the windows in the order of ARGV; or nil

local EXACT = 1024 -- as in sliding.lua

local values = redis.call('MGET', unpack(KEYS))
local count = #KEYS - 2
if values[count + 1] or values[count + 2] then return nil end -- a repeated call, or a line

local byte, sub, char, ceil = string.byte, string.sub, string.char, math.ceil
local now, granted_at = ARGV[1] + 0, nil
if now > 0 then
  granted_at = string.format('%.0f', now)
else
  local t = redis.call('TIME')
  now = tonumber(t[1]) * 1000000 + tonumber(t[2])
  granted_at = t[1] .. sub('00000' .. t[2], -6)
end

local function pack7(n) -- as in state.lua, without calls
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
end

local now7 = pack7(now)
local reply, denied, closes = {1, now, now, 0}, nil, false -- denied: the place in the reply of the first window that does
local before, new, lasts = {}, {}, {} -- resets if it is denied, by place in the reply; values and their ends, by scope
local out, i = 4, 5

for s = 1, count do
  local value, at = values[s], 9
  if value then
    local format, a, b, c, d, e, f, g = byte(value, 1, 8)
    if format ~= 1 or not g or ((((((a * 256 + b) * 256 + c) * 256 + d) * 256 + e) * 256 + f) * 256) + g > now then return nil end
  else
    if redis.call('EXISTS', KEYS[s]) == 1 then return nil end
    value = '\1'
  end
  local parts, n, ends = {'\1', now7}, 2, now
  local stop = i + ARGV[i] * 5
  while i < stop do
    local head, cost, p1, p2 = ARGV[i + 1], ARGV[i + 2] + 0, ARGV[i + 3] + 0, ARGV[i + 4] + 0
    -- The payload is from `first` to `last`, if the next section is this window's and still counts.
    local first, last = 1, 0
    local size = #head
    if sub(value, at, at + size - 1) == head then
      local a, b, c, d, e, f, g, x, y, z = byte(value, at + size, at + size + 9)
      if not z then return nil end
      first = at + size + 10
      last = first + x * 65536 + y * 256 + z - 1
      at = last + 1
      if last > #value then return nil end
      if ((((((a * 256 + b) * 256 + c) * 256 + d) * 256 + e) * 256 + f) * 256) + g <= now then first, last = 1, 0 end
    end
    local kind = byte(head, size)
    local used, fits, resets, payload, kept, added = 0, 0, now, nil, '', ''
    if kind == 115 then -- s
      local data, entries = first + 8, 0
      if last > 0 then
        local width, a, b, c, d, e, f, g = byte(value, first, first + 7)
        if width ~= 8 or (last - first - 7) % 8 ~= 0 then return nil end
        used = ((((((a * 256 + b) * 256 + c) * 256 + d) * 256 + e) * 256 + f) * 256) + g
        local dead = now - p2
        while data < last do
          local a, b, c, d, e, f, g, units = byte(value, data, data + 7)
          if ((((((a * 256 + b) * 256 + c) * 256 + d) * 256 + e) * 256 + f) * 256) + g > dead then break end
          used = used - units
          data = data + 8
        end
        entries = (last - data + 1) / 8
      end
      if entries > 0 then
        local a, b, c, d, e, f, g = byte(value, last - 7, last - 1)
        local newest = ((((((a * 256 + b) * 256 + c) * 256 + d) * 256 + e) * 256 + f) * 256) + g
        if newest >= now or entries >= EXACT then return nil end
        resets = newest + p2
      end
      before[out] = resets
      if cost > 255 then return nil end
      if cost > 0 and used + cost > p1 then
        -- Unit number u of an endless queue goes one period after unit u - limit does.
        local unit = used + cost - p1
        if entries ~= used or unit > used then return nil end
        local place = data + (unit - 1) * 8
        local a, b, c, d, e, f, g = byte(value, place, place + 6)
        fits = ((((((a * 256 + b) * 256 + c) * 256 + d) * 256 + e) * 256 + f) * 256) + g + p2
      elseif not denied then
        local all = used + cost
        payload = all < 256 and '\8\0\0\0\0\0\0' .. char(all) or '\8' .. pack7(all)
        if entries > 0 then kept = sub(value, data, last) end
        if cost > 0 then
          added = now7 .. char(cost)
          resets = now + p2
        end
      end
    elseif kind == 103 then -- g
      local drain, level = ARGV[i + 5] + 0, 0
      if last > 0 then
        if last - first ~= 20 then return nil end
        local a, b, c, d, e, f, g, h, j, k, l, m, n, o, p, q, r, t, u, v, x = byte(value, first, last)
        if ((((((p * 256 + q) * 256 + r) * 256 + t) * 256 + u) * 256 + v) * 256) + x ~= p2 then return nil end
        local since = ((((((a * 256 + b) * 256 + c) * 256 + d) * 256 + e) * 256 + f) * 256) + g
        level = ((((((h * 256 + j) * 256 + k) * 256 + l) * 256 + m) * 256 + n) * 256) + o - (now - since) * drain
        if level < 0 then level = 0 end
      end
      local filled = level + cost * p2
      used = ceil(level / p2)
      before[out] = now + ceil(level / drain)
      if cost > 0 and filled > p1 then
        fits = now + ceil((filled - p1) / drain)
      elseif not denied then
        resets = now + ceil(filled / drain)
        payload = now7 .. pack7(filled) .. pack7(p2)
      end
    else -- f
      local margin = ARGV[i + 5] + 0
      local first_use = margin % 2 == 1
      local period, start, newest = p2, now, now
      if first_use then
        margin = (margin - 1) / 2
        period = p2 + margin
      else
        margin = margin / 2
        start = now - now % p2
      end
      if last > 0 then
        if last - first ~= 20 then return nil end
        local a, b, c, d, e, f, g, h, j, k, l, m, n, o, p, q, r, t, u, v, x = byte(value, first, last)
        local began = ((((((a * 256 + b) * 256 + c) * 256 + d) * 256 + e) * 256 + f) * 256) + g
        local latest = ((((((h * 256 + j) * 256 + k) * 256 + l) * 256 + m) * 256 + n) * 256) + o
        if first_use and began + period > now or not first_use and latest >= start then
          if first_use then start = began end
          newest, used = latest, ((((((p * 256 + q) * 256 + r) * 256 + t) * 256 + u) * 256 + v) * 256) + x
        end
      end
      local stops = start + period
      before[out] = used == 0 and now or stops
      if margin > 0 and not first_use then
        closes = true
        if cost > 0 and now >= stops - margin then return nil end
      end
      if cost > 0 and used + cost > p1 then
        if used > p1 then return nil end
        fits = stops
      elseif not denied then
        if cost > 0 then newest = now end
        if used + cost > 0 then resets = stops end
        payload = pack7(start) .. pack7(newest) .. pack7(used + cost)
      end
    end
    if fits > 0 then
      denied = denied or out
      if fits > reply[3] then reply[3] = fits end
    elseif not denied then
      used = used + cost
      if resets > now then
        local length = #payload + #kept + #added
        parts[n + 1], parts[n + 2], parts[n + 3] = head, pack7(resets), length < 256 and '\0\0' .. char(length)
          or char((length - length % 65536) / 65536, (length % 65536 - length % 256) / 256, length % 256)
        parts[n + 4], parts[n + 5], parts[n + 6] = payload, kept, added
        n = n + 6
        if resets > ends then ends = resets end
      end
    end
    reply[out + 1], reply[out + 2], reply[out + 3] = used, fits, resets
    out, i = out + 3, i + 5
  end
  i = i + 1
  if at <= #value and values[s] then return nil end -- something else is there
  new[s], lasts[s] = parts, ends
end

if denied then
  -- Who waits goes the long way, and where a window closes at times the time is to be looked for.
  if closes or ARGV[4] == '1' then return nil end
  reply[1] = 0
  -- What was thought to be taken is not.
  out, i = 4, 5
  for _ = 1, count do
    local stop = i + ARGV[i] * 5
    while i < stop do
      if out < denied then reply[out + 1] = reply[out + 1] - ARGV[i + 2] end
      reply[out + 3] = before[out]
      out, i = out + 3, i + 5
    end
    i = i + 1
  end
  return reply
end
for s = 1, count do
  if lasts[s] > now then
    redis.call('SET', KEYS[s], table.concat(new[s]), 'PX', ceil((lasts[s] - now) / 1000) + 1)
  elseif values[s] then
    redis.call('DEL', KEYS[s])
  end
end
redis.call('SET', KEYS[count + 1], granted_at, 'PX', ARGV[3])
return reply
