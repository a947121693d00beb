-- wait.lua: the rest of reserve.lua, for calls that found a line or have to wait (line.lua).

local costs = parse_costs(own_costs)

local function grant()
  take_all()
  for _, suffix in ipairs(mine.suffixes) do nodes[suffix].changed = true end
end

if what == 'pump' then return finish(0, now) end

if what == 'retune' then
  local flow = find_flow(flow_id)
  if flow then
    count('w', weight - flow.weight)
    write('f', flow_id, int(weight) .. ' ' .. flow.tenant .. ' ' .. table.concat(flow.suffixes, ' ') .. ';' .. own_params)
    for _, suffix in ipairs(flow.suffixes) do due(suffix, now) end
  end
  return finish(0, now)
end

local t = ticket ~= '' and find_ticket(ticket)
local known, rank = t, nil

if t and (what == 'leave' or what == 'exempt' or t.flow ~= mine.id and what ~= 'peek' and what ~= 'skip') then
  -- Gone, or, after the policy's scopes or its own attributes changed, in another flow from now on.
  local flow = find_flow(t.flow)
  if flow then forget(t, flow) end
  rank = redis.call('EXISTS', KEYS[#KEYS]) == 1 and t.rank
  t = nil
end

if what == 'leave' then return finish(0, now) end

if what == 'skip' then
  local flow = t and t.state == 'c' and find_flow(t.flow)
  if flow then
    let_go(t, flow)
    take_back(t, flow)
    skip(t)
  end
  return finish(0, now)
end

if what == 'peek' then
  time = promise(mine, costs)
  if t then time = t.state == 'c' and now or max(t.promise, now + 1) end
  return reply(time > now and 0 or 1, time > now and real or now, time, windows, now)
end

if what == 'exempt' then
  grant()
  return finish(1, now)
end

if ticket == '' then
  time = promise(mine, costs)
  if time <= now and somebody_waits() then time = promise(mine, costs, nil, true) end
  if time > now then return reply(0, real, time, windows, now) end
  grant()
  return finish(1, now)
end

if not t then
  if what == 'reserve' and time <= now and not somebody_waits() and not blocker(mine, costs) then
    grant()
    return finish(1, now)
  end
  local tickets, others
  time, tickets, others = promise(mine, costs, front and 0 or nil)
  if what == 'plan' and not known and max_wait > 0 and time - now > max_wait then return reply(4, real, time, windows, now) end
  if what == 'plan' and not known and backlog > 0 and tickets >= backlog then return reply(5, real, time, windows, now) end
  t = join(time, others and not rank, rank)
else
  keep_flow()
  local other_costs = t.costs_text ~= own_costs
  if t.state == 'w' then
    if other_costs then change_costs(t, own_costs) end
    -- Nobody called it, but it is here: limits may have changed since its node was looked at.
    local at = read('a', mine.id)
    if at then due(string.match(at, '^(%S+)'), now) else move_up(mine) end
  elseif t.state == 's' or other_costs then
    let_go(t, mine)
    if t.state == 'c' then take_back(t, mine) end
    t.costs_text, t.costs = own_costs, costs
    enter(t, mine)
  end
end

local calls
if t.state == 'w' then
  calls = call_next()
  for _, id in ipairs(calls) do
    if id == ticket then t = find_ticket(ticket) end
  end
end

if what == 'plan' then
  return finish(known and 6 or 3, t.state == 'c' and real or max(t.promise, now + 1), calls)
end

if t.state == 'c' then
  change_held(mine, t.costs, -1)
  local blocked, free = blocker(mine, costs, true)
  if not blocked then
    t.state = 'granted'
    forget(t, mine)
    grant()
    return finish(1, now, calls)
  end
  -- A limit was cut since it was called: back to its place.
  change_held(mine, t.costs, 1)
  let_go(t, mine)
  take_back(t, mine)
  t.promise, t.calls = free, 0
  enter(t, mine)
  return finish(0, free, calls)
end
if t.promise <= now then
  local behind = redis.call('ZRANK', P .. 'f:' .. t.flow, t.id) or 0
  t.promise = max(promise(mine, costs, behind), now + 1)
  keep_ticket(t)
end
return finish(0, t.promise, calls)
