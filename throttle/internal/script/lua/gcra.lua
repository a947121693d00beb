-- gcra.lua: `burst` units at once, then one each period/limit.
-- Source: the generic cell rate algorithm (ITU-T I.371, the virtual scheduling form),
-- kept as the level of a leaky bucket in integers: no rounding error ever adds up.
--
--   parameters  p1 capacity (level of a full bucket), p2 scale (level of one unit), p3 drain (level per us)
--   payload     time(7) level(7) scale(7)

do
local floor, ceil, min, max = math.floor, math.ceil, math.min, math.max
local pack7, unpack7, MOST = codec.pack7, codec.unpack7, codec.MOST

algorithms['g'] = {
  readable = function(payload) return #payload == 21 and unpack7(payload, 15) > 0 end,

  load = function(p1, p2, p3, p4, payload, now)
    local st, level = {limit = p1, scale = p2, drain = p3, level = 0}, 0
    if payload then
      local scale = unpack7(payload, 15)
      level = unpack7(payload, 8)
      if scale ~= st.scale then level = ceil(level * st.scale / scale) end
      level = max(0, level - (now - unpack7(payload, 1)) * st.drain)
    end
    st.level = level
    return st
  end,

  fits_at = function(st, now, from, cost, ahead)
    local over = st.level + (cost + ahead) * st.scale - st.limit
    if over <= 0 then return from end
    return max(from, now + ceil(over / st.drain))
  end,

  take = function(st, now, cost)
    st.level = min(st.level + cost * st.scale, MOST)
  end,

  -- What has drained since the grant may have made room for others: it is not given back again.
  give_back = function(st, now, at, cost)
    local back = min(max(0, cost * st.scale - (now - at) * st.drain), st.level)
    st.level = st.level - back
    return floor(back / st.scale)
  end,

  capacity = function(st) return st.limit / st.scale end,

  used = function(st) return ceil(st.level / st.scale) end,

  resets_at = function(st, now) return now + ceil(st.level / st.drain) end,

  payload = function(st, now) return pack7(now) .. pack7(st.level) .. pack7(st.scale) end,
}
end
