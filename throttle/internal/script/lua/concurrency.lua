-- concurrency.lua: never more than `limit` units at once. Each reservation holds its units by a lease.
-- Source: the counting semaphore with leases (Gray, Cheriton: "Leases", 1989). A lease is renewed
-- while its holder runs, and given back when it ends. The lease of a dead worker expires.
--
--   parameters  p1 limit (units), p2 lease (us)
--   payload     used(7) hold(7) lease*
--   lease       expires(7) units(7) id(8), the soonest to expire first
--
-- `hold` estimates how long units are held (us). The first grant that says how long it may hold them sets it. A
-- longer hold replaces it at once, a shorter one moves it by a quarter of the difference. Expected starts go by it,
-- or by the lease if that is longer: they are upper bounds unless holders take longer than they did.

do

local LEASE = 22 -- bytes of a lease

-- find_lease returns the offset of a lease in st.data, or nil.
local function find_lease(st, id)
  local from = st.first
  while true do
    local at = find(st.data, id, from, true)
    if not at then return nil end
    if at - 14 >= st.first and (at - 14 - st.first) % LEASE == 0 then return at - 14 end
    from = at + 1
  end
end

-- add_lease inserts a lease in the order of expiry.
local function add_lease(st, expires, units, id)
  local lease = pack7(expires) .. pack7(units) .. id
  local i = #st.data + 1 -- a newer lease may end sooner, if the policy's lease was cut
  while i > st.first and unpack7(st.data, i - LEASE) > expires do i = i - LEASE end
  st.data = sub(st.data, st.first, i - 1) .. lease .. sub(st.data, i)
  st.first = 1
  st.used = st.used + units
end

-- remove_lease removes a lease and returns its units, 0 if there is none.
local function remove_lease(st, id)
  local i = find_lease(st, id)
  if not i then return 0 end
  local units = unpack7(st.data, i + 7)
  st.used = st.used - units
  st.data = sub(st.data, st.first, i - 1) .. sub(st.data, i + LEASE)
  st.first = 1
  return units
end

local function last_end(st, now)
  return st.first <= #st.data and unpack7(st.data, #st.data - LEASE + 1) or now
end

algorithms['c'] = {
  load = function(p1, p2, p3, p4, now, data, from, to)
    local st = {limit = p1, lease = p2, used = 0, hold = 0, data = '', first = 1}
    if data then
      local payload = sub(data, from, to)
      if #payload < 14 or (#payload - 14) % LEASE ~= 0 then return nil end
      st.used, st.hold, st.data, st.first = unpack7(payload, 1), unpack7(payload, 8), payload, 15
      while st.first <= #payload and unpack7(payload, st.first) <= now do
        st.used = st.used - unpack7(payload, st.first + 7)
        st.first = st.first + LEASE
      end
    end
    return st
  end,

  fits_at = function(st, now, cost, ahead, each)
    local all, room = st.used + ahead + cost, max(1, st.limit - st.limit % each) -- whole tickets only
    if all <= st.limit then return now end
    return now + max(1, ceil((all - room) / room)) * max(st.hold, st.lease)
  end,

  -- The call that gives back units makes the line due. Nobody calls when a lease expires.
  opens_at = function(st, now)
    if st.first > #st.data then return now + st.lease end
    return unpack7(st.data, st.first)
  end,

  charge = function(st, now, cost, hold, id)
    if st.hold == 0 then st.hold = hold end
    add_lease(st, now + st.lease, cost, id)
  end,

  give_back = function(st, now, at, cost, id) remove_lease(st, id) end,

  release = function(st, now, at, cost, id)
    local units = remove_lease(st, id)
    if units > 0 then st.hold = max(1, now - at, st.hold - ceil((st.hold - (now - at)) / 4)) end
    return units
  end,

  renew = function(st, now, cost, id, waits)
    local units = remove_lease(st, id)
    if units > 0 then
      cost = units
    elseif waits or st.used + cost > st.limit then
      return 0
    end
    add_lease(st, now + st.lease, cost, id)
    return cost
  end,

  resets_at = last_end,

  -- `hold` is kept for one lease after the last change.
  kept_until = function(st, now) return max(last_end(st, now), st.hold > 0 and now + st.lease or now) end,

  payload = function(st) return pack7(st.used) .. pack7(st.hold) .. sub(st.data, st.first) end,
}
end
