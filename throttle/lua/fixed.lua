-- fixed.lua: no bucket of `period` ever holds more than `limit` units.
-- Source: the fixed window counter. Buckets are aligned to 1970, or start at the first use.
--
--   parameters  limit (units), period (us), margin (us), first_use (1, or 0 for the clock)
--   payload     start(7) last(7) used(7): when the bucket began, when a unit was last taken, how many
--
-- With `first_use` a bucket lasts period + margin. By the clock, the last `margin` of a bucket
-- grants nothing: a call that leaves then may arrive in the next one.

-- When the bucket by the clock that `time` falls in began.
local function clock_start(w, time) return floor(time / w.period) * w.period end

algorithms['f'] = {
  readable = function(payload) return #payload == 21 end,

  load = function(w, payload, now)
    w.limit, w.period, w.margin, w.first_use = w.p1, w.p2, w.p3, w.p4 == 1
    local st = {start = now, last = now, used = 0}
    if w.first_use then
      w.period = w.period + w.margin
      if payload and unpack7(payload, 1) + w.period > now then
        st.start, st.last, st.used = unpack7(payload, 1), unpack7(payload, 8), unpack7(payload, 15)
      end
      st.ends = st.start + w.period
    else
      st.start = clock_start(w, now)
      st.ends = st.start + w.period
      -- By the time of the last unit, not by the bucket's start: the period may have changed since.
      if payload and unpack7(payload, 8) >= st.start then
        st.last, st.used = unpack7(payload, 8), unpack7(payload, 15)
      end
    end
    return st
  end,

  fits_at = function(w, st, now, from, cost, ahead)
    local used, ends = min(st.used, w.limit), st.ends
    if from >= ends then
      used = 0
      ends = (w.first_use and from or clock_start(w, from)) + w.period
    end
    local buckets = ceil((used + ahead + cost) / w.limit) - 1
    local time = from
    if buckets > 0 then time = ends + (buckets - 1) * w.period end
    if not w.first_use and w.margin > 0 then
      local closes = clock_start(w, time) + w.period
      if time >= closes - w.margin then time = closes end
    end
    return time
  end,

  take = function(w, st, now, cost)
    st.used, st.last = min(st.used + cost, MOST), now
  end,

  give_back = function(w, st, now, at, cost)
    if at < st.start then return 0 end
    local back = min(cost, st.used)
    st.used = st.used - back
    return back
  end,

  capacity = function(w) return w.limit end,

  used = function(w, st) return st.used end,

  resets_at = function(w, st, now)
    if st.used == 0 then return now end
    return st.ends
  end,

  payload = function(w, st) return pack7(st.start) .. pack7(st.last) .. pack7(st.used) end,
}
