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

local LEASE, ID = 22, 15 -- bytes of a lease, and the number of the byte at which its id begins

-- add_lease inserts a lease in the order of expiry. st.leases has all of them, as in the payload.
local function add_lease(st, now, units, id)
  local expires, i = now + st.lease, #st.leases + 1
  -- Leases that began earlier may end later, if the policy's lease was cut.
  while i > 1 and unpack7(st.leases, i - LEASE) > expires do i = i - LEASE end
  st.leases = sub(st.leases, 1, i - 1) .. pack7(expires) .. pack7(units) .. id .. sub(st.leases, i)
  st.used = st.used + units
end

-- remove_lease removes a lease and returns its units, 0 if there is none.
local function remove_lease(st, id)
  local found = find(st.leases, id, 1, true)
  -- The same bytes may also occur elsewhere in a lease, or across two.
  while found and found % LEASE ~= ID do found = find(st.leases, id, found + 1, true) end
  if not found then return 0 end
  local i = found - ID + 1 -- where the lease begins
  local units = unpack7(st.leases, i + 7)
  st.used = st.used - units
  st.leases = sub(st.leases, 1, i - 1) .. sub(st.leases, i + LEASE)
  return units
end

-- last_end returns when the last lease ends, `now` without one.
local function last_end(st, now)
  return st.leases == '' and now or unpack7(st.leases, #st.leases - LEASE + 1)
end

algorithms['c'] = {
  load = function(p1, p2, p3, p4, now, data, from, to)
    local st = {limit = p1, lease = p2, used = 0, hold = 0, leases = ''}
    if not data then return st end
    local first = from + 14 -- where the first lease begins; after the loop, the first one that has not ended
    if first > to + 1 or (to + 1 - first) % LEASE ~= 0 then return nil end
    st.used, st.hold = unpack7(data, from), unpack7(data, from + 7)
    while first <= to and unpack7(data, first) <= now do
      st.used = st.used - unpack7(data, first + 7)
      first = first + LEASE
    end
    st.leases = sub(data, first, to)
    return st
  end,

  -- Units go in rounds: when all of a round have ended, the next ones go, as whole tickets. With a limit of 5, tickets
  -- of 2 units and 9 units in all, 4 units are held now, 4 go a round later, and the last one two rounds later.
  fits_at = function(st, now, cost, ahead, each)
    local all = st.used + ahead + cost
    if all <= st.limit then return now end
    local room = max(1, st.limit - st.limit % each)
    local rounds = max(1, ceil((all - room) / room))
    return now + rounds * max(st.hold, st.lease)
  end,

  -- A call that gives back units makes the line due. No call tells that a lease expires, so takes look then.
  opens_at = function(st, now) return st.leases == '' and now + st.lease or unpack7(st.leases, 1) end,

  charge = function(st, now, cost, hold, id)
    if st.hold == 0 then st.hold = hold end
    add_lease(st, now, cost, id)
  end,

  give_back = function(st, now, at, cost, id) remove_lease(st, id) end, -- the whole lease, whatever it costs

  release = function(st, now, at, cost, id)
    local units, held = remove_lease(st, id), now - at
    if units > 0 then st.hold = max(1, held, st.hold - ceil((st.hold - held) / 4)) end
    return units
  end,

  renew = function(st, now, cost, id, waits)
    local units = remove_lease(st, id)
    if units == 0 and not waits and st.used + cost <= st.limit then units = cost end
    if units > 0 then add_lease(st, now, units, id) end
    return units
  end,

  resets_at = last_end,

  -- `hold` is kept for one lease after the last change.
  kept_until = function(st, now) return max(last_end(st, now), st.hold > 0 and now + st.lease or now) end,

  payload = function(st) return pack7(st.used) .. pack7(st.hold) .. st.leases end,
}
end
