-- line_lists.lua: the flows that wait at a node, in order, as a take goes through them.
--
-- new_lists(L) returns these functions:
--   head_of(node, n) -> flow, ticket   the first flow of a node and its first ticket; nil if nobody
--                                      waits there. It reads n flows at a time
--   settle_in(node, flow)              puts a flow in its place, by its new score
--   move(flow, ticket, suffix, time)   has a flow wait at another node of its queue, until a time
--   open_node(node, steps) -> steps    looks at a node that is due: flows that have room there go
--                                      where they wait next. It returns how many steps are left

local function new_lists(L)
  local HEADS = 16 -- tickets of a flow that are read at once

  local call = L.call
  local P, now, ROOT = call.P, call.now, windows.ROOT

  -- load_heads reads the first tickets of flows, as many as may be taken, in few commands.
  local function load_heads(list, n)
    local last, tickets = format('%d', min(HEADS - 1, ceil((n - 1) / max(1, #list)))), {}
    for k = 1, #list do
      local flow = list[k]
      if not flow.heads and flow.popped == 0 then
        flow.heads, flow.head = redis.call('ZRANGE', P .. 'f:' .. flow.id, '0', last), 1
        for i = 1, #flow.heads do tickets[#tickets + 1] = flow.heads[i] end
      end
    end
    L.read_all('t', tickets)
  end

  -- load_list reads the first n flows of a node, in order, with their scopes and first tickets.
  local function load_list(node, n)
    local key, last, found, step = P .. 'n:' .. node.name, format('%d', n - 1), nil, 1
    if call.only_tenants then
      found = redis.call('ZRANGE', key, '0', last)
    else
      found, step = redis.call('ZRANGE', key, '0', last, 'WITHSCORES'), 2
    end
    local ids, members = {}, {}
    for i = 1, #found, step do
      ids[#ids + 1] = sub(found[i], 18)
      members[#members + 1] = found[i]
    end
    L.read_all('f', ids)
    local list, suffixes, seen, stale = {}, {}, {}, {}
    for k = 1, #ids do
      local flow = L.flow_of(ids[k])
      if not flow or flow.suffix ~= node.suffix or flow.stored_rank ~= sub(members[k], 1, 16) then
        stale[#stale + 1] = members[k]
      else
        if not flow.score then
          if not node.shared then
            flow.score = flow.rank + 0
          elseif call.only_tenants then
            flow.score = flow.tag
          else
            flow.score = found[2 * k] + 0
          end
          flow.stored_score = flow.score
        end
        list[#list + 1] = flow
        for i = 1, #flow.suffixes do
          local suffix = flow.suffixes[i]
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
    load_heads(list, n)
  end

  -- Stale flows are dropped.
  local function head_of(node, n)
    while true do
      if not node.list or not node.list[1] and node.more then
        L.flush_places()
        load_list(node, n)
      end
      local flow = node.list[1]
      if not flow then
        if not node.more then return nil end
      else
        local ticket = flow.suffix == node.suffix and L.first_ticket(flow)
        if ticket then return flow, ticket end
        table.remove(node.list, 1)
        if flow.suffix == node.suffix then flow.suffix, flow.changed = nil, true end -- it is empty
      end
    end
  end

  local function settle_in(node, flow)
    local list, score = node.list, flow.score
    local i = #list
    while i > 0 and
      (list[i].score > score or list[i].score == score and list[i].rank > flow.rank) do
      i = i - 1
    end
    if i == #list and node.more then return end -- it stands behind flows that were not read
    table.insert(list, i + 1, flow)
  end

  local function move(flow, ticket, suffix, time)
    local node = L.node_of(flow.queue, suffix)
    flow.suffix, flow.rank, flow.changed, flow.opened = suffix, ticket.rank, true, true
    flow.score = L.score(node, flow)
    if node.list then settle_in(node, flow) end
    L.due(flow.queue, suffix, time)
    if L.order then L.order.moved(suffix) end
  end

  local function open_node(node, steps)
    while steps > 0 do
      steps = steps - 1
      local flow, ticket = head_of(node, 4)
      if not flow then
        L.set_due(node.queue, node.suffix, false)
        return steps
      end
      local blocked, time = L.blocker(flow, ticket.costs)
      if blocked and blocked.suffix == node.suffix then
        L.set_due(node.queue, node.suffix, time)
        return steps
      end
      table.remove(node.list, 1)
      move(flow, ticket, blocked and blocked.suffix or ROOT, blocked and time or now)
      local scope = node.shared and flow.suffix == ROOT and call.open[node.suffix]
      if scope then -- what the flow will take is not free for the next
        local ahead = scope.ahead or {}
        for unit, cost in pairs(ticket.costs.units) do ahead[unit] = (ahead[unit] or 0) + cost end
        scope.ahead = ahead
      end
    end
    return steps
  end

  return head_of, settle_in, move, open_node
end
