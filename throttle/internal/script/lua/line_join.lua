-- line_join.lua: how tickets enter a line, and when they are expected to start.
--
-- new_join(L) returns a table of the functions below. Their parameters: r, a request whose line part was read
-- (request.lua); list, the scopes of r; `at`, the time of these scopes.

local function new_join(L)
  local SLOTS = -1 -- `binds` if handler slots do
  local ZERO, FRONT = 4503599627370496, 1000000000000000 -- ranks of time 0, at the end and in front

  local call, expected = L.call, new_eta(L)
  local P, now = call.P, call.now
  -- Most joins need none of these.
  local function fair() return made_once(new_fair, L) end
  local function heads() return made_once(new_heads, L) end
  local function order() return made_once(new_order, L, {}, false) end
  local unwritten = false -- whether a ticket joined in this call that Redis does not know yet

  -- flow_for returns the flow of a request, a new one unless it waits.
  local function flow_for(r)
    local flow = L.flow_of(r.flow)
    if flow and flow.n > 0 then return flow end
    return L.new_flow(r.flow, r.weight + 0, r.tenant, concat(r.suffixes, '+'), r.settings or '')
  end

  -- prefetch reads what these requests need of the line, by few commands.
  local function prefetch(requests)
    local tickets, flows, nodes = {}, {}, {}
    for i = 1, #requests do
      local r = requests[i]
      if r.ticket then tickets[#tickets + 1] = r.ticket end
      flows[#flows + 1] = r.flow
      call.batches = call.batches or r.batch
      for s = 1, r.flow and not call.only_tenants and #r.suffixes or 0 do
        nodes[#nodes + 1] = r.queue .. '|' .. r.suffixes[s]
      end
    end
    L.read_all('t', tickets)
    L.read_all('f', flows)
    L.read_all('u', nodes)
  end

  -- put_flow puts a flow at its node, if its new ticket is its first one. If the last take went by other limits,
  -- the next take looks at the flow again.
  local function put_flow(flow, id, rank, costs)
    if flow.n > 1 then
      flow.heads, flow.first = nil, nil
      local first = heads().first_ticket(flow)
      if not first or first.id ~= id then return end
    end
    heads().put(flow, {rank = rank, costs = costs})
    local known, limits = redis.call('GET', P .. 'l'), L.limits
    if not known then
      redis.call('SET', P .. 'l', '0 ' .. limits, 'EX', L.ttl)
    elseif match(known, ' (.*)$') ~= limits then
      heads().due_by(flow.queue, flow.suffix, now)
    end
  end

  -- new_rank returns the next rank, at the end of the line or of the tickets in front. Ranks have 16 digits, and
  -- grow with time: so a ticket goes before later ones even if the line was empty in between.
  local function new_rank(front)
    L.rank = max(L.rank + 1, now)
    return L.rank + (front and FRONT or ZERO)
  end

  -- enter puts a ticket in line at its rank. It keeps the window that binds, and puts the flow at its node.
  local function enter(r, q, flow, costs, binds)
    local id, is_first = r.ticket, flow.n == 0
    local rank = format('%d', (r.rank or new_rank(r.front)) + 0)
    if q.claims then q.asked = now end
    unwritten = true
    if is_first then
      if L.flows[r.flow] then L.flush() end -- its last ticket left in this call, and that is not written yet
      L.flows[r.flow] = flow
      q.weights, q.flows = q.weights + flow.weight, q.flows + 1
      if call.only_tenants then flow.tag = fair().tag_of(q, flow) end
    end
    local text = costs.text
    if text == 'requests=1' then text = '' end -- the costs of most tickets
    local values = q.batch and '!' .. flow.values or flow.values
    local key = binds > 0 and not find(r.key, '+', 1, true) and r.key .. '+' .. binds or r.key
    L.write('t', id, rank .. text .. ' ' .. values .. ' ' .. key)
    L.change('f:' .. r.flow, id, rank + 0)
    L.count(flow, costs, 1)
    if is_first or r.front or r.rank then put_flow(flow, id, rank, costs) end
  end

  -- with_slots returns start, latest and binds, or those of a handler slot if that is expected later.
  local function with_slots(flow, position, start, latest, binds)
    local slot = appointments.slot_at(L.queue_of(flow.queue), now, flow, position)
    if slot > max(start, latest) then return slot, 0, SLOTS end
    return start, latest, binds
  end

  -- granted moves the tags of sides for a grant by reserve, as takes do, if batches wait.
  local function granted(r, list)
    order().note_grant(flow_for(r), list, windows.costs_of(call, r.costs_text))
    order().write()
  end

  -- somebody_waits returns whether tickets other than `id` delay the request: tickets that wait at its scopes.
  -- Without a shared window ROOT is no such scope: tickets wait there for a slot, which the request has. Instead, the
  -- first ticket of its flow delays it, if that ticket has other costs than the request, and does not fit now. Tickets
  -- of a batch delay a live request only if it owes them room.
  local function somebody_waits(r, id)
    local batch, flow_name = r.batch, id and L.flow_name(id)
    local ticket_flow = flow_name and L.flow_of(flow_name)
    for i = 1, call.batches and not batch and #r.suffixes or 0 do
      if order().owed(flow_for(r), call.open[r.suffixes[i]]) then return true end
    end
    if unwritten then L.flush() end
    unwritten = false
    for name, q in pairs(L.queues) do
      if (batch or not q.batch) and (name == r.queue and q.n > 0 or name ~= r.queue and L.alive(q)) then
        for i = 1, #r.suffixes do
          local suffix = r.suffixes[i]
          local own_node = ticket_flow and ticket_flow.n == 1 and ticket_flow.queue == name and ticket_flow.suffix
          if L.count_flows(name .. '|' .. suffix) > (own_node == suffix and 1 or 0) then return true end
        end
      end
    end
    local flow = not call.numbers[''] and L.flow_of(r.flow)
    if flow and flow.suffix == ROOT and flow.same ~= windows.costs_of(call, r.costs_text) then
      local first = heads().first_ticket(flow)
      return first and first.id ~= id and heads().blocker(flow, first.costs) and true or false
    end
    return false
  end

  -- expect returns start, latest, binds and earliest of a request without a ticket.
  local function expect(r, list, at, fits)
    return expected(flow_for(r), list, at, windows.costs_of(call, r.costs_text), nil, true, fits)
  end

  -- expect_ticket returns start, latest and binds of the request's ticket, or, if it has none, of its flow's
  -- last ticket; nil if that ticket does not wait.
  local function expect_ticket(r, list, at, fits)
    local flow = L.flow_of(r.flow)
    if not flow or flow.n == 0 then return nil end
    L.flush()
    local key = P .. 'f:' .. flow.id
    local id = r.ticket or redis.call('ZRANGE', key, '-1', '-1')[1]
    local position = id and redis.call('ZRANK', key, id)
    if not position then return nil end
    local _, text = L.ticket(id)
    if L.flow_name(id) ~= flow.id then return nil end
    list, at = resumed(r, list, at)
    local start, latest, binds =
      expected(flow, list, at, windows.costs_of(call, text), position, false, fits)
    return with_slots(flow, position, start, latest, binds)
  end

  -- refresh sets a flow's weight and settings to the request's.
  local function refresh(r)
    local flow, settings = L.flow_of(r.flow), r.settings or ''
    if not flow or flow.n == 0 or flow.weight == r.weight + 0 and flow.settings_text == settings then return end
    local q = L.queue_of(flow.queue)
    q.weights, q.changed = max(0, q.weights + r.weight - flow.weight), true
    flow.weight, flow.settings_text, flow.changed = r.weight + 0, settings, true
    flow.settings = windows.settings_of(call, flow.settings_text)
    if flow.suffix then heads().due_by(flow.queue, flow.suffix, now) end
  end

  local function waits_at(suffix)
    for name, q in pairs(L.queues) do
      if L.alive(q) and heads().due_at(name, suffix) then return true end
    end
    return false
  end

  -- tags_back moves the tags of a tenant back, for a taken ticket that is cancelled or put back.
  local function tags_back(r)
    local flow = flow_for(r)
    fair().move_tags(flow, windows.costs_of(call, r.costs_text), -1)
    if flow.n > 0 and flow.suffix then
      L.move(flow, flow.suffix, flow.rank, fair().score(L.node_of(flow.queue, flow.suffix), flow, flow.rank))
    end
  end

  -- join puts the ticket of a request in line. It returns the values of a verb (decide.lua).
  local function join(r, list, at, earlier_status)
    local costs = windows.costs_of(call, r.costs_text)
    local name = L.read('t', r.ticket) and L.flow_name(r.ticket)
    if name == r.flow then -- it waits already; the copy of a call nudges again, which does no harm
      local kept, key = match(L.read('t', r.ticket), '^(.* )([^ :+]*)')
      if key ~= match(r.key, '^[^:+]*') then L.write('t', r.ticket, kept .. r.key) end -- another task has the ID now
      local start, latest, binds = expect_ticket(r, list, at, nil)
      if start then return earlier_status == 3 and 3 or 6, now, start, latest, binds, earlier_status == 3 and 1 or nil end
    end
    list, at = resumed(r, list, at)
    local flow = flow_for(r)
    local position = nil
    if r.front then -- only tickets in front go before it
      L.flush()
      position = redis.call('ZCOUNT', P .. 'f:' .. flow.id, '-inf', format('(%d', ZERO))
    end
    local start, latest, binds, earliest = expected(flow, list, at, costs, position)
    if r.backlog and flow.n >= r.backlog then return 5, now, start, latest, binds, 0 end
    local refused = (r.max_wait or r.deadline) and too_late(r, start, latest, earliest)
    if refused then return refused, now, start, latest, binds, 0 end
    if name then -- the ticket leaves another flow, as its scopes or attributes have changed
      heads().remove(r.ticket)
      flow = flow_for(r)
    end
    local q = L.queue_of(r.queue)
    enter(r, q, flow, costs, binds)
    local nudge = (r.rank or r.paused) and 0 or appointments.nudge(q, now, start)
    start, latest, binds = with_slots(flow, position or flow.n - 1, start, latest, binds)
    return 3, now, start, latest, binds, nudge
  end

  return {
    ticket = L.ticket, prefetch = prefetch, flow_name = L.flow_name, join = join, granted = granted,
    somebody_waits = somebody_waits, expect = expect, expect_ticket = expect_ticket, tags_back = tags_back,
    refresh = refresh, waits_at = waits_at, heads = heads, finish = L.finish,
  }
end
