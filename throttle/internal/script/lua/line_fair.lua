-- line_fair.lua: the order of flows at a node of several tenants. It is start-time fair queueing (Goyal, Vin, Cheng,
-- 1996): see docs/explanation/line.md. A taken ticket moves a tag by its part of the node's tightest window.
--
-- A tenant's tag is kept in g:NODE, and in node.tags during the call. But if windows count by no attribute but the
-- tenant (only_tenants), it has one flow, whose record has the tag while the flow has tickets.

local function new_fair(L)
  local WHOLE = 100000000 -- how far a tag moves for a grant of a window's whole limit
  local SLOT = 100000     -- how far a tag moves for a handler slot

  local call, fair = L.call, {}

  -- part_of returns how far costs, by window, move a tag: by the largest part of a limit that they take, else by SLOT.
  function fair.part_of(scope, costs)
    local part = 0
    for _, i in ipairs(scope.spec.windows) do
      local of_window = costs[i] / scope.states[i].limit
      if of_window > part then part = of_window end
    end
    return part > 0 and part * WHOLE or SLOT
  end

  function fair.tag_of(node, flow)
    if call.only_tenants and flow.n > 0 then return flow.tag end
    local tag = node.tags[flow.tenant]
    if not tag then
      tag = (L.stored > 0 and redis.call('ZSCORE', call.P .. 'g:' .. node.key, flow.tenant) or 0) + 0
      node.tags[flow.tenant] = tag
    end
    return tag
  end

  local function set_tag(node, flow, tag)
    if call.only_tenants then flow.tag, flow.changed = tag, true end
    if not call.only_tenants or flow.n == 0 then
      node.tags[flow.tenant], node.moved = tag, true
      L.change('g:' .. node.key, flow.tenant, tag)
    end
  end

  -- keep_tag keeps the tag of a flow whose last ticket has left, as its record will be deleted.
  function fair.keep_tag(node, flow)
    if call.only_tenants and flow.tag > node.v then set_tag(node, flow, flow.tag) end
  end

  -- move_tags moves the tags for a taken ticket (1), or back for a cancelled grant (-1). Weights are in thousandths.
  function fair.move_tags(flow, costs, sign)
    local list = L.nodes_of(flow)
    for i = 1, #list do
      local node = list[i]
      if node.shared then
        local tag = fair.tag_of(node, flow)
        if sign > 0 then tag = max(tag, node.v) end
        if sign > 0 and tag > node.v then node.v, node.changed, node.moved = tag, true, true end
        if node.part_costs ~= costs then
          local scope = node.number and scopes.open(call, node.suffix, node.number, nil) -- nil without a window
          node.part_costs, node.part = costs, scope and fair.part_of(scope, costs.windows) or SLOT
        end
        local least = 2 * tag / MOST -- doubles round: a grant adds at least this, a refund takes off this much more
        local step = max(least, node.part * 1000 / flow.weight)
        set_tag(node, flow, max(0, tag + (sign > 0 and step or -step - least)))
      end
    end
  end

  -- score returns the score of a flow at a node: its tag, at least V; at a node of one tenant its first ticket's rank.
  function fair.score(node, flow, rank)
    return node.shared and max(fair.tag_of(node, flow), node.v) or rank + 0
  end

  return fair
end
