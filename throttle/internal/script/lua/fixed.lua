-- fixed.lua: no span between two resets ever has more than `limit` units. Source: the fixed window counter. Without
-- a calendar it resets at multiples of a period since 1970. The caller computes the ticks of a calendar
-- (calendar.go). A call uses the newest tick in effect by the clock of Redis, and needs two later ones, or fails.
--
--   parameters  p1 limit (units), p2 margin (us), p3 period (us; of a calendar a number that tells it
--               from others), p4 ticks (of a calendar: seconds since 1970 by commas, ascending)
--   payload     last(7) used(7) late(7): when a unit was last taken, the units since the reset, and
--               how many of them the upstream may count after the next reset
--
-- The upstream's clock may differ by `margin`. So a reset takes effect `margin` after its time, and a grant within
-- `margin` of its time counts on both sides of it.
--
-- In the state, `resets` are the times of the reset at which the span began, and of later resets. Later times than
-- these are taken to be `gap` apart: the period, or the least time between two ticks that were sent.

do

-- calendar_resets returns three values: a list of the newest tick in effect and all later ticks, or nothing if that
-- tick is missing or fewer than two are later; the last tick; and the least time between two ticks.
local function calendar_resets(ticks, margin, now)
  local resets, last, gap = {false}, -MOST, MOST
  for seconds in gmatch(ticks, '%d+') do
    local tick = seconds * 1000000
    if tick - last < gap then gap = tick - last end
    last = tick
    if tick + margin <= now then resets[1] = tick else resets[#resets + 1] = tick end
  end
  return resets[1] and resets[3] and resets, last, gap
end

algorithms['f'] = {
  load = function(p1, p2, p3, p4, now, data, from, to)
    if data and to - from ~= 20 then return nil end
    local calendar = p4 ~= 0
    local resets, tick, gap, period = nil, 0, p3, p3
    if calendar then period, resets, tick, gap = nil, calendar_resets(p4, p2, now) end
    local clock_off = calendar and not resets
    if not resets then -- they are multiples of the gap from 1970 or, by a guess, from the last tick
      local began = tick + floor((now - p2 - tick) / gap) * gap
      resets = {began, began + gap, began + 2 * gap}
    end
    local st = {limit = p1, margin = p2, period = period, gap = gap, resets = resets, last = 0, used = 0, late = 0}
    -- The time of the last unit decides what counts on, as period and calendar may have changed since.
    local in_effect, last = resets[1] + p2, data and unpack7(data, from) or -MOST
    if last >= in_effect then
      st.last, st.used, st.late = last, unpack7(data, from + 7), unpack7(data, from + 14)
    elseif last >= resets[1] - p2 then -- in the margin: what came late counts on, as if it had come at the reset
      st.last, st.used = in_effect, unpack7(data, from + 14)
    end
    return st, clock_off
  end,

  -- Units go now, after resets[2], after resets[3] and so on. With a limit of 3, 2 units used, and 5 units ahead, 1 of
  -- these goes now, 3 go after resets[2], and the last one and a cost of 1 go after resets[3].
  fits_at = function(st, now, cost, ahead, each)
    local limit, resets, margin, room = st.limit, st.resets, st.margin, st.limit - st.used
    if ahead + cost <= room then return now end
    if ahead < each then each = 1 end -- no whole ticket goes first; else room % each is left over in each span
    local go_now = min(ahead, max(0, room - room % each))
    local next_room = limit - st.late -- after resets[2]
    if now >= resets[2] - margin then next_room = next_room - go_now end -- these count after the reset, too
    local left, number = ahead - go_now, 2 -- `cost` goes after resets[number]
    if left + cost > next_room then
      left = max(0, left - max(0, next_room - next_room % each))
      number = 2 + ceil((left + cost) / max(1, limit - limit % each))
    end
    local known = min(number, #resets)
    return resets[known] + (number - known) * st.gap + margin
  end,

  charge = function(st, now, cost)
    st.used, st.last = min(st.used + cost, MOST), now
    if now >= st.resets[2] - st.margin then st.late = min(st.late + cost, MOST) end
  end,

  give_back = function(st, now, at, cost)
    if at < st.resets[1] - st.margin then return end -- they count no more
    local back = min(cost, st.used)
    st.used = st.used - back
    if at >= st.resets[2] - st.margin then st.late = max(0, st.late - back) end
  end,

  resets_at = function(st, now)
    if st.used == 0 then return now end
    return st.resets[st.late > 0 and 3 or 2] + st.margin
  end,

  payload = function(st) return pack7(st.last) .. pack7(st.used) .. pack7(st.late) end,
}
end
