-- line_lists.lua: the flows that wait at a node, in order, as a take goes through them.
--
-- new_lists(L) returns a table of
--   head_of(node, n) -> flow, ticket   the first flow of a node and its first ticket; nil if nobody
--                                      waits there. It reads n flows at a time
--   settle_in(node, flow, score)       puts a flow that is first at its place by another score
--   move(node, flow, ticket, suffix, time)
--                                      lets the first flow of a node wait at another one of its
--                                      queue, until a time
--   open_node(node, steps) -> steps    looks at a node that is due: flows that have room there go
--                                      where they wait next. It returns how many steps are left

local function new_lists(L)
  local call, places, lists = L.call, once(new_places, L), {}
  local P, now, ROOT = call.P, call.now, windows.ROOT

  -- load_list reads the first n flows of a node, in order, with their scopes and first tickets.
  local function load_list(node, n)
    local key, last, found, step = P .. 'n:' .. node.key, format('%d', n - 1), nil, 1
    if call.only_tenants then
      found = redis.call('ZRANGE', key, '0', last)
    else
      found, step = redis.call('ZRANGE', key, '0', last, 'WITHSCORES'), 2
    end
    local ids = {}
    for i = 1, #found, step do ids[#ids + 1] = sub(found[i], 18) end
    L.read_all('f', ids)
    local list, suffixes, seen, stale = {}, {}, {}, {}
    for k = 1, #ids do
      local flow, member = L.flow_of(ids[k]), found[step * (k - 1) + 1]
      if not flow or flow.suffix ~= node.suffix or flow.stored_rank ~= sub(member, 1, 16) then
        stale[#stale + 1] = member
      else
        if not flow.score then
          flow.score = not node.shared and flow.rank + 0 or call.only_tenants and flow.tag or found[2 * k] + 0
          flow.stored_score = flow.score
        end
        list[#list + 1] = flow
        local of_flow = L.suffixes_of(flow)
        for i = 1, #of_flow do
          local suffix = of_flow[i]
          if not call.open[suffix] and call.raw[suffix] == nil and not seen[suffix] then
            seen[suffix] = true
            suffixes[#suffixes + 1] = suffix
          end
        end
      end
    end
    if stale[1] then redis.call('ZREM', key, unpack(stale)) end
    node.list, node.more = list, #ids == n
    scopes.read(call, suffixes)
    places.load_heads(list, ceil((n - 1) / max(1, #list)) + 1)
  end

  -- Flows without tickets are dropped.
  function lists.head_of(node, n)
    while true do
      if not node.list or not node.list[1] and node.more then
        L.flush_places()
        load_list(node, n)
      end
      local flow = node.list[1]
      if flow then
        local ticket = flow.suffix == node.suffix and places.first_ticket(flow)
        if ticket then return flow, ticket end
        table.remove(node.list, 1)
        if flow.suffix == node.suffix then flow.suffix, flow.changed = nil, true end
      elseif not node.more then
        return nil
      end
    end
  end

  local function insert(node, flow)
    local list, score = node.list, flow.score
    local i = #list
    while i > 0 and
      (list[i].score > score or list[i].score == score and list[i].rank > flow.rank) do
      i = i - 1
    end
    if i == #list and node.more then return end -- it stands behind flows that were not read
    table.insert(list, i + 1, flow)
  end

  function lists.settle_in(node, flow, score)
    table.remove(node.list, 1)
    flow.score = score
    insert(node, flow)
  end

  function lists.move(node, flow, ticket, suffix, time)
    table.remove(node.list, 1)
    flow.opened = true
    places.wait(flow, ticket.rank, suffix, time)
    local other = L.node_of(flow.queue, suffix)
    if other.list then insert(other, flow) end
    if L.order then L.order.moved(suffix) end
  end

  function lists.open_node(node, steps)
    while steps > 0 do
      steps = steps - 1
      local flow, ticket = lists.head_of(node, 4)
      if not flow then
        places.set_due(node.queue, node.suffix, false)
        return steps
      end
      local blocked, time = places.blocker(flow, ticket.costs)
      if blocked and blocked.suffix == node.suffix then
        places.set_due(node.queue, node.suffix, time)
        return steps
      end
      lists.move(node, flow, ticket, blocked and blocked.suffix or ROOT, blocked and time or now)
      local scope = node.shared and flow.suffix == ROOT and call.open[node.suffix]
      if scope then -- what the flow will take is not free for the next
        local ahead = scope.ahead or {}
        for unit, cost in pairs(ticket.costs.units) do ahead[unit] = (ahead[unit] or 0) + cost end
        scope.ahead = ahead
      end
    end
    return steps
  end

  return lists
end
