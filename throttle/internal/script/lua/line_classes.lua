-- line_classes.lua: live tickets go before those of batches, in everything that they share.
--
-- Where live tickets wait, a ticket of a batch waits too, whether or not it fits. But batches have
-- a share of each scope and of the slots, so that they cannot starve. While a batch waits at a
-- scope, what live tickets owe it there grows by the share of every live grant. A ticket of a batch
-- that goes first costs the rest of its own part. Live tickets leave room for one that is owed to.
-- Parts are those of tags (line_fair.lua).
--
-- A batch that takes all that a window holds at once would have live tickets wait for a period. So
-- its other tickets are spread evenly over windows of at most a minute: a live one then finds room
-- soon, as it is the next to go. Windows of longer periods are used up as they are.
--
-- A queue of another server counts where its tickets wait for a window, or if that server is about
-- to ask. Nobody knows when it has a slot.
--
-- Key, behind the prefix P of the policy:
--   u          "c SUFFIX" -> "owed time": what is owed, in thousandths; and when the next ticket of a
--              batch goes at its pace (us)
--
-- new_classes(L, names) -> C; names are the queues of a take, of either class
--   ratio                        the most that batches get for each unit of live tickets
--   reset()                      before others are served: who waits where is read again
--   held(scope, costs) -> time   until when live tickets hold up one of a batch; nil if they do not
--   kept(scope) -> units         what live tickets leave to a batch, by unit; false if nothing
--   charge(flow, list, costs)    counts a grant; list: the flow's scopes
--   pace(scope, i, units, from) -> time, period
--                                when one of a batch goes at its pace that has so many units before
--                                it, if these begin at `from`; nil if the window is not paced
--   root                         stands for a scope where tickets wait for slots only

local function new_classes(L, names)
  local SHARE = 0.05    -- of Policy.BatchShare: Go writes that of the policy here
  local LATE = 20000    -- us for which a server may be late
  local SLOT = 100000   -- the part of a slot
  local MOST_OWED = 64  -- parts of one ticket
  local PACED = 60000000 -- us: the longest period of windows that are paced
  local BURST = 100000  -- us by which tickets of a batch may go before their time

  local call = L.call
  local P, now = call.P, call.now
  local own, live_waits = {}, false
  for i = 1, #names do own[names[i]] = true end
  for _, q in pairs(L.queues) do
    if not q.batch and q.n > 0 then live_waits = true end
  end

  local held_until, keeps, waits, records = {}, {}, {}, {} -- by suffix
  local C = {ratio = SHARE / (1 - SHARE), root = {suffix = windows.ROOT}}

  function C.reset() held_until, keeps, waits = {}, {}, {} end

  local function record_of(suffix)
    local r = records[suffix]
    if r then return r end
    local owed, time = match(L.read('u', 'c ' .. suffix) or '0 0', '^(%d+) (%d+)$')
    r = {owed = owed / 1000, time = time + 0}
    records[suffix] = r
    return r
  end

  local function write(suffix, r)
    local some = r.owed > 0 or r.time > now
    L.write('u', 'c ' .. suffix, some and format('%d %d', r.owed * 1000, r.time) or false)
  end

  local function spread(scope, i, units)
    local st = scope.states[i]
    if not st.period or st.period > PACED then return nil end
    return units * st.period / st.limit
  end

  function C.pace(scope, i, units, from)
    local time = spread(scope, i, units)
    if not time then return nil end
    local begins = max(record_of(scope.suffix).time - BURST, from)
    return ceil(begins + max(0, time - BURST)), scope.states[i].period
  end

  -- first_of returns the first flow of a queue at a scope, and until when it counts there; nil if it
  -- does not.
  local function first_of(name, q, suffix)
    if q.n == 0 or not own[name] and not L.alive(q) then return nil end
    local due = L.due_at(name, suffix)
    if not due then return nil end
    if due <= now and not own[name] then
      local late = now - LATE
      local asks = q.first > late and q.first or q.last > late and q.last
      if not asks or asks > now + LATE then return nil end
      due = asks + LATE
    end
    L.flush_places()
    local member = redis.call('ZRANGE', P .. 'n:' .. name .. '|' .. suffix, '0', '0')[1]
    local flow = member and L.flow_of(sub(member, 18))
    if flow then return flow, due end
    return nil
  end

  local function live_until(suffix)
    local known = held_until[suffix]
    if known ~= nil then return known end
    known = false
    for name, q in pairs(L.queues) do
      if live_waits and not q.batch then
        local flow, due = first_of(name, q, suffix)
        if flow then known = known and min(known, due) or due end
      end
    end
    held_until[suffix] = known
    return known
  end

  -- batch_at returns the first flow of batches at a scope, or false.
  local function batch_at(suffix)
    local known = waits[suffix]
    if known ~= nil then return known end
    known = false
    for name, q in pairs(L.queues) do
      if q.batch and not known then known = first_of(name, q, suffix) or false end
    end
    waits[suffix] = known
    return known
  end

  local function part_of(scope, by_window)
    local part = scope.of and L.part_of(scope, by_window) or 0
    return part > 0 and part or SLOT
  end

  function C.held(scope, costs)
    local time, r = live_until(scope.suffix), record_of(scope.suffix)
    if time and r.owed >= (1 - SHARE) * part_of(scope, costs.windows) then return nil end
    local paced = r.time > now + BURST and r.time - BURST or nil
    return time and paced and max(time, paced) or time or paced
  end

  function C.kept(scope)
    local suffix = scope.suffix
    local known = keeps[suffix]
    if known ~= nil then return known end
    known = false
    local part = record_of(suffix).owed
    local flow = part > 0 and batch_at(suffix)
    if flow then
      local of, units, costs = scope.of.windows, {}, {}
      for j = 1, #of do
        local unit = call.windows[of[j]].unit
        local _, _, most = line_units.of_unit(flow, unit)
        units[unit], costs[of[j]] = most, most
      end
      if part >= (1 - SHARE) * part_of(scope, costs) then known = units end
    end
    keeps[suffix] = known
    return known
  end

  local function charge_at(flow, scope, costs)
    local suffix = scope.suffix
    local r, by_window = record_of(suffix), costs.windows
    if byte(flow.queue, -1) == 33 then
      -- Where no live ticket waits, nothing is owed any more.
      r.owed = live_until(suffix) and max(0, r.owed - (1 - SHARE) * part_of(scope, by_window)) or 0
      local of, longest = scope.of and scope.of.windows or {}, 0
      for j = 1, #of do longest = max(longest, spread(scope, of[j], by_window[of[j]]) or 0) end
      if longest > 0 then r.time = ceil(max(r.time, now) + longest) end
      write(suffix, r)
    elseif batch_at(suffix) then
      local part = part_of(scope, by_window)
      r.owed = min(r.owed + SHARE * part, max(part, SLOT) * MOST_OWED)
      write(suffix, r)
    end
  end

  function C.charge(flow, list, costs)
    for s = 1, #list do charge_at(flow, list[s], costs) end
    if not L.numbers[''] then charge_at(flow, C.root, costs) end
  end

  return C
end
