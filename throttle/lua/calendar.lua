-- calendar.lua: no span between two ticks of a calendar ever holds more than `limit` units.
-- Source: the fixed window counter, by ticks that the caller worked out (calendar.go). Redis's clock
-- chooses among them, and a call whose ticks are not around it is refused.
--
--   parameters  limit (units), margin (us), schedule (a number, which line.lua compares), ticks (seconds since 1970 by commas, ascending)
--   payload     tick(7) used(7) late(7): the tick that the span began with, the units since, and those
--               of them that may be counted after the next tick at the far side
--
-- A tick takes effect `margin` after its time, and what is granted from `margin` before its time on
-- is counted on both sides of it: the far side's clock may differ by as much.

algorithms['t'] = {
  readable = function(payload) return #payload == 21 end,

  load = function(w, payload, now)
    w.limit, w.margin = w.p1, w.p2
    local st = {ticks = {}, used = 0, late = 0}
    for seconds in string.gmatch(w.p4, '%d+') do st.ticks[#st.ticks + 1] = tonumber(seconds) * 1000000 end
    local last = #st.ticks
    st.at = 0
    while st.at < last and st.ticks[st.at + 1] + w.margin <= now do st.at = st.at + 1 end
    if st.at == 0 or st.at > last - 2 then
      st.refused = true
      st.at = max(1, min(st.at, last - 2))
    end
    st.tick = st.ticks[st.at]
    if payload then
      local tick = unpack7(payload, 1)
      if tick >= st.tick then
        -- Also of another calendar, which ticked later: it goes by that until this one ticks.
        st.tick, st.used, st.late = tick, unpack7(payload, 8), unpack7(payload, 15)
      elseif tick == st.ticks[st.at - 1] then
        st.used = unpack7(payload, 15)
      end
    end
    return st
  end,

  fits_at = function(w, st, now, from, cost, ahead)
    local last, units, i = #st.ticks, ahead + cost, st.at
    local base = st.used
    -- From which tick on `from` is, and what is counted there.
    while i < last and st.ticks[i + 1] + w.margin <= from do
      i = i + 1
      base = i == st.at + 1 and st.late or 0
    end
    while units > max(0, w.limit - base) do
      units = units - max(0, w.limit - base)
      i = i + 1
      base = i == st.at + 1 and st.late or 0
      if i > last then -- farther than the ticks known: as the last two are apart
        i = i + ceil(units / w.limit) - 1
        break
      end
    end
    local tick = st.ticks[min(i, last)] + max(0, i - last) * (st.ticks[last] - st.ticks[last - 1])
    return max(from, tick + w.margin)
  end,

  take = function(w, st, now, cost)
    st.used = min(st.used + cost, MOST)
    if now >= st.ticks[st.at + 1] - w.margin then st.late = min(st.late + cost, MOST) end
  end,

  give_back = function(w, st, now, at, cost)
    if at < st.ticks[st.at] - w.margin then return 0 end
    local back = min(cost, st.used)
    st.used = st.used - back
    if at >= st.ticks[st.at + 1] - w.margin then st.late = max(0, st.late - back) end
    return back
  end,

  capacity = function(w) return w.limit end,

  used = function(w, st) return st.used end,

  resets_at = function(w, st, now)
    if st.used == 0 then return now end
    return st.ticks[st.late > 0 and st.at + 2 or st.at + 1] + w.margin
  end,

  payload = function(w, st) return pack7(st.tick) .. pack7(st.used) .. pack7(st.late) end,
}
