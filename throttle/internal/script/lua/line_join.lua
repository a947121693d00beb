-- line_join.lua: how tickets enter a line, and when they are expected to start.
--
-- new_join(L) returns a table of the functions below. Their parameters: r, a request whose line part was read
-- (request.lua); list, the scopes of r; `at`, the time of these scopes.

local function new_join(L)
  local ZERO, FRONT = 4503599627370496, 1000000000000000 -- ranks of time 0, at the end and in front

  local call, forecast = L.call, new_eta(L)
  local P, now = call.P, call.now
  -- Most joins need none of these.
  local function fair() return made_once(new_fair, L) end
  local function heads() return made_once(new_heads, L) end
  local function order() return made_once(new_order, L, {}, false) end

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

  -- enter puts a ticket in line at its rank. It keeps the window that binds, if any, and puts the flow at its node.
  local function enter(r, q, flow, costs, binds)
    local id, is_first = r.ticket, flow.n == 0
    local rank = format('%d', (r.rank or new_rank(r.front)) + 0)
    if q.claims then q.asked = now end
    if is_first then
      if L.flows[r.flow] then L.flush() end -- its last ticket left in this call, and that is not written yet
      L.flows[r.flow] = flow
      q.weights, q.flows = q.weights + flow.weight, q.flows + 1
      if call.only_tenants then flow.tag = fair().tag_of(q, flow) end
    end
    local text = costs.text
    if text == 'requests=1' then text = '' end -- the costs of most tickets
    local values = q.batch and '!' .. flow.values or flow.values
    local key = binds and not find(r.key, '+', 1, true) and r.key .. '+' .. binds or r.key
    L.write('t', id, rank .. text .. ' ' .. values .. ' ' .. key)
    L.change('f:' .. r.flow, id, rank + 0)
    L.count(flow, costs, 1)
    if is_first or r.front or r.rank then put_flow(flow, id, rank, costs) end
  end

  -- wait_for_slot lets the answer wait for a handler slot, if that is expected later.
  local function wait_for_slot(answer, flow, position)
    local slot = appointments.slot_at(L.queue_of(flow.queue), now, flow, position)
    if slot > max(answer.time, answer.latest) then answer.time, answer.latest, answer.binds = slot, 0, SLOTS end
  end

  -- granted moves the tags of sides for a grant by reserve, as takes do. It is called if batches wait or join.
  local function granted(r, list)
    order().note_grant(flow_for(r), list, windows.costs_of(call, r.costs_text))
    order().write()
  end

  -- owes_room returns whether a live request owes room to other sides, if batches wait: they delay it only so.
  local function owes_room(r)
    for i = 1, call.batches and not r.batch and #r.suffixes or 0 do
      if order().owed(flow_for(r), call.open[r.suffixes[i]]) then return true end
    end
    return false
  end

  -- others_wait returns whether flows wait at the request's scopes, in a queue that it goes after. A flow whose
  -- only ticket is the request's own does not count.
  local function others_wait(r, id)
    local flow_name = id and L.flow_name(id)
    local own = flow_name and L.flow_of(flow_name)
    for name, q in pairs(L.queues) do
      local waits = q.n > 0 and (name == r.queue or L.alive(q))
      for i = 1, waits and (r.batch or not q.batch) and #r.suffixes or 0 do
        local suffix = r.suffixes[i]
        local is_own = own and own.n == 1 and own.queue == name and own.suffix == suffix
        if L.count_flows(name .. '|' .. suffix) > (is_own and 1 or 0) then return true end
      end
    end
    return false
  end

  -- first_goes_before returns whether the first ticket of the request's flow waits at ROOT, and does not fit now.
  -- If all tickets of the flow cost what the request does, they fit too, and wait for a slot, which the request has.
  local function first_goes_before(r, id)
    local flow = L.flow_of(r.flow)
    if not flow or flow.suffix ~= ROOT or flow.same == windows.costs_of(call, r.costs_text) then return false end
    local first = heads().first_ticket(flow)
    return first and first.id ~= id and heads().blocker(flow, first.costs) and true or false
  end

  -- somebody_waits returns whether tickets other than `id` delay the request.
  local function somebody_waits(r, id)
    L.flush() -- tickets may have joined or left in this call
    -- Without a shared window ROOT is no scope of the request: only its own flow may delay it there.
    return owes_room(r) or others_wait(r, id) or not call.numbers[''] and first_goes_before(r, id)
  end

  -- expect returns the answer to a request without a ticket, and its earliest start.
  local function expect(r, list, at, fits)
    local costs = windows.costs_of(call, r.costs_text)
    return forecast({flow = flow_for(r), costs = costs, position = nil, all_first = true}, list, at, fits)
  end

  -- expect_ticket returns the answer for the request's ticket, or, if it has none, for its flow's last ticket; nil
  -- if that ticket does not wait.
  local function expect_ticket(r, list, at, fits)
    local flow = L.flow_of(r.flow)
    if not flow or flow.n == 0 then return nil end
    L.flush()
    local key = P .. 'f:' .. flow.id
    local id = r.ticket or redis.call('ZRANGE', key, '-1', '-1')[1]
    local position = id and redis.call('ZRANK', key, id)
    if not position or L.flow_name(id) ~= flow.id then return nil end
    local _, text = L.ticket(id)
    list, at = resumed(r, list, at)
    local costs = windows.costs_of(call, text)
    local answer = forecast({flow = flow, costs = costs, position = position, all_first = false}, list, at, fits)
    wait_for_slot(answer, flow, position)
    return answer
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
  local function join(r, list, at, joined_before)
    local costs = windows.costs_of(call, r.costs_text)
    local name = L.flow_name(r.ticket)
    if name == r.flow then -- it waits already, unless the set of its flow has lost it
      local kept, key = match(L.read('t', r.ticket), '^(.* )([^ :+]*)')
      if key ~= match(r.key, '^[^:+]*') then L.write('t', r.ticket, kept .. r.key) end -- another task has the ID now
      local answer = expect_ticket(r, list, at, nil)
      if answer then
        answer.nudge = joined_before or nil -- once more, which does no harm
        return joined_before and 'joined' or 'waits', now, answer
      end
    end
    list, at = resumed(r, list, at)
    local flow, position = flow_for(r), nil
    if r.front then -- only tickets in front go before it
      L.flush()
      position = redis.call('ZCOUNT', P .. 'f:' .. flow.id, '-inf', format('(%d', ZERO))
    end
    local answer, earliest = forecast({flow = flow, costs = costs, position = position, all_first = false}, list, at)
    if r.backlog and flow.n >= r.backlog then return 'backlog', now, answer end
    local refusal = (r.max_wait or r.deadline) and refused(r, answer, earliest)
    if refusal then return refusal, now, answer end
    if name then -- it leaves its old flow, as scopes or attributes have changed; or the set of its own has lost it
      heads().remove(r.ticket)
      flow = flow_for(r)
    end
    local q = L.queue_of(r.queue)
    enter(r, q, flow, costs, answer.binds)
    answer.nudge = not r.rank and not r.paused and appointments.nudge(q, now, answer.time) or nil
    wait_for_slot(answer, flow, position or flow.n - 1)
    return 'joined', now, answer
  end

  return {
    ticket = L.ticket, prefetch = prefetch, flow_name = L.flow_name, join = join, granted = granted,
    somebody_waits = somebody_waits, expect = expect, expect_ticket = expect_ticket, tags_back = tags_back,
    refresh = refresh, waits_at = waits_at, heads = heads, finish = L.finish,
  }
end
