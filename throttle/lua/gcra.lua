-- gcra.lua: `burst` units at once, then one each period/limit.
-- Source: the generic cell rate algorithm (ITU-T I.371, the virtual scheduling form),
-- kept as the level of a leaky bucket in integers: no rounding error ever adds up.
--
--   parameters  capacity (level of a full bucket), scale (level of one unit), drain (level per us), unused
--   payload     time(7) level(7) scale(7)

algorithms['g'] = {
  readable = function(payload) return #payload == 21 and unpack7(payload, 15) > 0 end,

  load = function(w, payload, now)
    w.capacity, w.scale, w.drain = w.p1, w.p2, w.p3
    local level = 0
    if payload then
      local scale = unpack7(payload, 15)
      level = unpack7(payload, 8)
      if scale ~= w.scale then level = ceil(level * w.scale / scale) end
      level = max(0, level - (now - unpack7(payload, 1)) * w.drain)
    end
    return {level = level}
  end,

  fits_at = function(w, st, now, from, cost, ahead)
    local over = st.level + (cost + ahead) * w.scale - w.capacity
    if over <= 0 then return from end
    return max(from, now + ceil(over / w.drain))
  end,

  take = function(w, st, now, cost)
    st.level = min(st.level + cost * w.scale, MOST)
  end,

  -- What has drained since the grant may have made room for others: it is not given back again.
  give_back = function(w, st, now, at, cost)
    local back = min(max(0, cost * w.scale - (now - at) * w.drain), st.level)
    st.level = st.level - back
    return floor(back / w.scale)
  end,

  capacity = function(w) return w.capacity / w.scale end,

  used = function(w, st) return ceil(st.level / w.scale) end,

  resets_at = function(w, st, now) return now + ceil(st.level / w.drain) end,

  payload = function(w, st, now) return pack7(now) .. pack7(st.level) .. pack7(w.scale) end,
}
