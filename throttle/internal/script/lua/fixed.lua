-- fixed.lua: no bucket of `period` ever holds more than `limit` units.
-- Source: the fixed window counter. Buckets are aligned to 1970.
--
--   parameters  p1 limit (units), p2 period (us), p3 margin (us)
--   payload     last(7) used(7): when a unit was last taken, and units
--
-- The last `margin` of a bucket grants nothing: a call that leaves then may arrive in the next one.

do

-- bucket_end tells when the bucket that holds `time` ends.
local function bucket_end(period, time) return (floor(time / period) + 1) * period end

algorithms['f'] = {
  load = function(p1, p2, p3, p4, now, data, from, to)
    if data and to - from ~= 13 then return nil end
    local st = {limit = p1, period = p2, margin = p3, ends = bucket_end(p2, now), last = now, used = 0}
    -- By the time of the last unit, not by the bucket's start: the period may have changed since.
    if data and unpack7(data, from) >= st.ends - p2 then
      st.last, st.used = unpack7(data, from), unpack7(data, from + 7)
    end
    return st
  end,

  fits_at = function(st, now, from, cost, ahead, each)
    local limit, used, ends = st.limit, min(st.used, st.limit), st.ends
    if from >= ends then
      used = 0
      ends = bucket_end(st.period, from)
    end
    local buckets = ceil((used + ahead + cost) / limit) - 1
    if each > 1 and ahead >= each then -- whole tickets only
      local room = floor((limit - used) / each)
      buckets = max(buckets, floor((floor(ahead / each) - room) / max(1, floor(limit / each))) + 1)
    end
    local time = from
    if buckets > 0 then time = ends + (buckets - 1) * st.period end
    if st.margin > 0 then
      local closes = bucket_end(st.period, time)
      if time >= closes - st.margin then time = closes end
    end
    return time
  end,

  take = function(st, now, cost)
    st.used, st.last = min(st.used + cost, MOST), now
  end,

  give_back = function(st, now, at, cost)
    if at < st.ends - st.period then return 0 end
    local back = min(cost, st.used)
    st.used = st.used - back
    return back
  end,

  resets_at = function(st, now)
    if st.used == 0 then return now end
    return st.ends
  end,

  payload = function(st) return pack_time(st.last) .. pack7(st.used) end,
}
end
