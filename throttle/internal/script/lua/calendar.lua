-- calendar.lua: no span between two ticks of a calendar ever holds more than `limit` units.
-- Source: the fixed window counter, by ticks that the caller worked out (calendar.go). Redis's
-- clock chooses among them, and a call whose ticks are not around it is refused.
--
--   parameters  p1 limit (units), p2 margin (us), p3 schedule (a number, which tells schedules
--               apart), p4 ticks (seconds since 1970 by commas, ascending)
--   payload     tick(7) used(7) late(7): the tick that the span began with, the units since, and
--               the ones that the upstream may count after the next tick
--
-- A tick takes effect `margin` after its time, and a grant from `margin` before its time on
-- counts on both sides of it: the upstream's clock may differ by as much.

algorithms['t'] = {
  load = function(p1, p2, p3, p4, now, data, from, to)
    if data and to - from ~= 20 then return nil end
    local ticks = {}
    for seconds in gmatch(p4, '%d+') do ticks[#ticks + 1] = tonumber(seconds) * 1000000 end
    local last = #ticks
    local st = {limit = p1, margin = p2, ticks = ticks, used = 0, late = 0, at = 0, tick = 0, clock_off = false}
    while st.at < last and ticks[st.at + 1] + st.margin <= now do st.at = st.at + 1 end
    if st.at == 0 or st.at > last - 2 then
      st.clock_off = true
      st.at = max(1, min(st.at, last - 2))
    end
    st.tick = ticks[st.at]
    if data then
      local tick = unpack7(data, from)
      if tick >= st.tick then
        -- Also of another calendar, which ticked later: it goes by that until this one ticks.
        st.tick, st.used, st.late = tick, unpack7(data, from + 7), unpack7(data, from + 14)
      elseif tick == ticks[st.at - 1] then
        st.used = unpack7(data, from + 14)
      end
    end
    return st
  end,

  fits_at = function(st, now, from, cost, ahead, each)
    local last, units, i = #st.ticks, ahead + cost, st.at
    local limit, base = st.limit, st.used
    -- The tick before `from`, and the units since.
    while i < last and st.ticks[i + 1] + st.margin <= from do
      i = i + 1
      base = i == st.at + 1 and st.late or 0
    end
    local function room() -- of whole tickets
      local left = max(0, limit - base)
      if each > 1 and ahead >= each then left = left - left % each end
      return left
    end
    while units > room() do
      units = units - room()
      i = i + 1
      base = i == st.at + 1 and st.late or 0
      if i > last then -- farther than the ticks known: as the last two are apart
        base = 0
        i = i + ceil(units / max(1, room())) - 1
        break
      end
    end
    local tick = st.ticks[min(i, last)] + max(0, i - last) * (st.ticks[last] - st.ticks[last - 1])
    return max(from, tick + st.margin)
  end,

  take = function(st, now, cost)
    st.used = min(st.used + cost, MOST)
    if now >= st.ticks[st.at + 1] - st.margin then st.late = min(st.late + cost, MOST) end
  end,

  give_back = function(st, now, at, cost)
    if at < st.ticks[st.at] - st.margin then return 0 end
    local back = min(cost, st.used)
    st.used = st.used - back
    if at >= st.ticks[st.at + 1] - st.margin then st.late = max(0, st.late - back) end
    return back
  end,

  resets_at = function(st, now)
    if st.used == 0 then return now end
    return st.ticks[st.late > 0 and st.at + 2 or st.at + 1] + st.margin
  end,

  payload = function(st) return pack_time(st.tick) .. pack7(st.used) .. pack7(st.late) end,
}
