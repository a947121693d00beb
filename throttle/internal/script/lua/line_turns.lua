-- line_turns.lua: whose turn it is where queues wait that no server asks for together.
--
-- A take serves the queues of one server. Queues of other servers that wait at the same scope share
-- with them what becomes free, by start-time fair queueing, as tenants do within a queue. A queue's
-- tag at a scope moves by what it took of the tightest window, over the weights of its flows that
-- wait there. At a tenant's own scope queues have equal weights.
--
-- A take leaves room for tickets of other queues that come before its own, if servers are about to
-- ask for them: they have an appointment about now, or were told that their ticket fits later. For
-- slots only an appointment counts, as nobody knows when one is free. A queue whose appointment has
-- passed for LATE holds up nobody, and gets no credit.
--
-- Key, behind the prefix P of the policy:
--   s:SUFFIX   "V queue=tag queue=tag ...": the tags that are above V; of batches, s:SUFFIX!
--
-- new_turns(L, names, with, batch) -> U, or nil if no queue of another server waits. names are the
-- queues of this take, with is what their servers are known by (z in line.lua), and batch is whether
-- they are the batches' side: each class has its own turns.
--   at(flow, scope) -> {reserved, lapses}: units that are left to others, and until when; nil if
--                         nobody else waits there
--   charge(flow, costs)   counts what was taken
--   write()               writes the tags that have moved

local function new_turns(L, names, with, batch)
  local LATE = 20000      -- us
  local FLOWS = 16        -- flows of a node that are weighed
  local KEPT = 60000      -- ms for which tags are kept, at least

  local own, others = {}, nil
  for i = 1, #names do own[names[i]] = true end
  local call = L.call
  local P, now = call.P, call.now
  for name, q in pairs(L.queues) do
    if q.batch == batch and not own[name] and q.with ~= with and L.alive(q) then
      local late = now - LATE
      local asks = q.first > late and q.first or q.last > late and q.last
      if asks then
        others = others or {}
        others[#others + 1] = {name = name, asks = asks, dues = nil}
      end
    end
  end
  if not others then return nil end

  local U, turns = {}, {}

  local function key_of(suffix) return P .. 's:' .. suffix .. (batch and '!' or '') end

  -- dues_of tells when the first 128 nodes of a queue are due.
  local function dues_of(other)
    local dues = other.dues
    if dues then return dues end
    dues = {}
    other.dues = dues
    local found = redis.call('ZRANGE', P .. 'd:' .. other.name, '0', '127', 'WITHSCORES')
    for i = 1, #found, 2 do dues[found[i]] = found[i + 1] + 0 end
    return dues
  end

  -- weight_at returns the weight of a queue's flows that wait at a scope, or at ROOT if none does.
  local function weight_at(queue, scope)
    if scope.of.of_tenant then return 1000 end
    local node, ids, sum = P .. 'n:' .. queue .. '|' .. scope.suffix, {}, 0
    local found = redis.call('ZRANGE', node, '0', format('%d', FLOWS - 1))
    if not found[1] and scope.suffix ~= windows.ROOT then
      node = P .. 'n:' .. queue .. '|' .. windows.ROOT
      found = redis.call('ZRANGE', node, '0', format('%d', FLOWS - 1))
    end
    for i = 1, #found do ids[i] = sub(found[i], 18) end
    L.read_all('f', ids)
    for i = 1, #ids do
      local flow = L.flow_of(ids[i])
      sum = sum + (flow and flow.weight or 0)
    end
    if #ids == FLOWS then sum = ceil(sum * redis.call('ZCARD', node) / FLOWS) end
    return sum
  end

  -- step returns what costs, by window, move a tag by.
  local function step(scope, costs, weight)
    return max(1, ceil(L.part_of(scope, costs) * 1000 / weight))
  end

  -- mean_costs returns what a ticket of others costs, by unit and by window.
  local function mean_costs(scope, of)
    local units, costs, list = {}, {}, scope.of.windows
    for j = 1, #list do
      local i = list[j]
      local unit = call.windows[i].unit
      units[unit] = ceil(line_units.of_unit(of, unit) / of.n)
      costs[i] = units[unit]
    end
    return units, costs
  end

  -- lapses tells until when room is left to a queue, 0 if it is not.
  local function lapses(scope, other, due)
    local of, slots = scope.of.windows, false
    for j = 1, #of do slots = slots or call.windows[of[j]].algorithm.release end
    if due > now and not slots then return due + LATE end
    return other.asks <= now + LATE and other.asks + LATE or 0
  end

  -- waits_there returns what another queue has waiting at a scope, or nil.
  local function waits_there(name, flow, scope)
    local of
    if call.only_tenants and scope.of.of_tenant then
      of = L.flow_of(name .. flow.values)
    else
      of = L.node_of(name, scope.suffix)
    end
    local there = of and of.n > 0 and (of.suffix == scope.suffix or of.suffix == windows.ROOT)
    return there and of or nil
  end

  -- read_tags returns V of a scope, and the tags of queues that are above it.
  local function read_tags(suffix)
    local v, tags = 0, {}
    local text = redis.call('GET', key_of(suffix))
    if text then
      v = match(text, '^%d+') + 0
      for name, tag in gmatch(text, '([^ =]*)=(%d+)') do tags[name] = tag + 0 end
    end
    return v, tags
  end

  -- new_turn returns what is known of the turns at a scope, or false if nobody else waits there.
  local function new_turn(flow, scope)
    local list, suffix = {}, scope.suffix
    for k = 1, #others do
      local name, dues = others[k].name, dues_of(others[k])
      local due = dues[suffix] or dues[windows.ROOT] -- flows that fit everywhere wait at ROOT
      local of = due and waits_there(name, flow, scope)
      if of then
        local units, costs = mean_costs(scope, of)
        list[#list + 1] = {
          name = name, n = of.n, tag = 0, units = units, lapses = lapses(scope, others[k], due),
          step = step(scope, costs, max(1, weight_at(name, scope))),
        }
      end
    end
    if not list[1] then return false end
    local v, tags = read_tags(suffix)
    local turn = {
      scope = scope, others = list, v = v, tags = tags, tag = v, weight = 0, moved = true,
      changed = false, reserved = {}, lapses = 0,
    }
    for i = 1, #names do
      turn.tag = max(turn.tag, tags[names[i]] or 0)
      local q = L.queues[names[i]]
      if q and q.n > 0 and not scope.of.of_tenant then
        turn.weight = turn.weight + weight_at(names[i], scope)
      end
    end
    turn.weight = scope.of.of_tenant and 1000 or max(turn.weight, flow.weight)
    for k = 1, #list do list[k].tag = max(v, tags[list[k].name] or 0) end
    return turn
  end

  function U.at(flow, scope)
    local turn = turns[scope.suffix]
    if turn == nil then
      turn = new_turn(flow, scope)
      turns[scope.suffix] = turn
    end
    if not turn then return nil end
    if turn.moved then
      turn.moved, turn.reserved, turn.lapses = false, {}, MOST
      for k = 1, #turn.others do
        local other = turn.others[k]
        if other.tag < turn.tag and other.lapses > 0 then
          local before = min(other.n, ceil((turn.tag - other.tag) / other.step))
          for unit, cost in pairs(other.units) do
            turn.reserved[unit] = (turn.reserved[unit] or 0) + before * cost
          end
          turn.lapses = min(turn.lapses, other.lapses)
        end
      end
    end
    return turn
  end

  function U.charge(flow, costs)
    local list = L.scopes_of(flow)
    for s = 1, #list do
      local turn = turns[list[s].suffix]
      if turn then
        local v = turn.tag
        for k = 1, #turn.others do v = min(v, turn.others[k].tag) end
        turn.v = max(turn.v, v)
        turn.tag = turn.tag + step(turn.scope, costs.windows, turn.weight)
        turn.moved, turn.changed = true, true
      end
    end
  end

  -- write_tags writes the tags at a scope, and keeps them until its windows are empty.
  local function write_tags(suffix, turn)
    local tags, words, lasts = turn.tags, {format('%d', turn.v)}, now
    for i = 1, #names do
      if L.queues[names[i]] then tags[names[i]] = turn.tag end
    end
    for name, tag in pairs(tags) do
      if tag > turn.v then words[#words + 1] = format('%s=%d', name, tag) end
    end
    local of = turn.scope.of.windows
    for j = 1, #of do
      local i = of[j]
      lasts = max(lasts, call.windows[i].algorithm.resets_at(turn.scope.states[i], now))
    end
    local ms = format('%d', max(KEPT, ceil((lasts - now) / 1000)))
    redis.call('SET', key_of(suffix), concat(words, ' '), 'PX', ms)
  end

  function U.write()
    for suffix, turn in pairs(turns) do
      if turn and turn.changed then write_tags(suffix, turn) end
    end
  end

  return U
end
