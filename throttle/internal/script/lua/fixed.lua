-- fixed.lua: no bucket of `period` ever holds more than `limit` units.
-- Source: the fixed window counter. Buckets are aligned to 1970, or start at the first use.
--
--   parameters  p1 limit (units), p2 period (us), p3 margin (us), p4 first_use (1) or clock (0)
--   payload     start(7) last(7) used(7): when the bucket began, when a unit was last taken, units
--
-- With `first_use` a bucket lasts period + margin. By the clock, the last `margin` of a bucket
-- grants nothing: a call that leaves then may arrive in the next one.

-- clock_start tells when the bucket that holds `time` began, by the clock.

do

local function clock_start(st, time) return floor(time / st.period) * st.period end

algorithms['f'] = {
  load = function(p1, p2, p3, p4, now, data, from, to)
    if data and to - from ~= 20 then return nil end
    local st = {
      limit = p1, period = p2, margin = p3, first_use = p4 == 1, start = now, last = now, used = 0,
      ends = now,
    }
    if st.first_use then
      st.period = st.period + st.margin
      if data and unpack7(data, from) + st.period > now then
        st.start, st.last, st.used = unpack7(data, from), unpack7(data, from + 7), unpack7(data, from + 14)
      end
      st.ends = st.start + st.period
    else
      st.start = clock_start(st, now)
      st.ends = st.start + st.period
      -- By the time of the last unit, not by the bucket's start: the period may have changed since.
      if data and unpack7(data, from + 7) >= st.start then
        st.last, st.used = unpack7(data, from + 7), unpack7(data, from + 14)
      end
    end
    return st
  end,

  fits_at = function(st, now, from, cost, ahead, each)
    local limit, used, ends = st.limit, min(st.used, st.limit), st.ends
    if from >= ends then
      used = 0
      ends = (st.first_use and from or clock_start(st, from)) + st.period
    end
    local buckets = ceil((used + ahead + cost) / limit) - 1
    if each > 1 and ahead >= each then -- whole tickets only
      local room = floor((limit - used) / each)
      buckets = max(buckets, floor((floor(ahead / each) - room) / max(1, floor(limit / each))) + 1)
    end
    local time = from
    if buckets > 0 then time = ends + (buckets - 1) * st.period end
    if not st.first_use and st.margin > 0 then
      local closes = clock_start(st, time) + st.period
      if time >= closes - st.margin then time = closes end
    end
    return time
  end,

  take = function(st, now, cost)
    if st.first_use and st.used == 0 then st.start, st.ends = now, now + st.period end
    st.used, st.last = min(st.used + cost, MOST), now
  end,

  give_back = function(st, now, at, cost)
    if at < st.start then return 0 end
    local back = min(cost, st.used)
    st.used = st.used - back
    return back
  end,

  longest = function(window) return ceil(2 * (window.p2 + window.p3) / 1000000) end,

  resets_at = function(st, now)
    if st.used == 0 then return now end
    return st.ends
  end,

  payload = function(st) return pack_time(st.start) .. pack_time(st.last) .. pack7(st.used) end,
}
end
