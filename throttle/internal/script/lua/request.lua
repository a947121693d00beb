-- request.lua: one request of a batch: what it says, and what the verbs share.
--
-- A request r is a table with the values and fields that decide.lua lists, where the request says
-- them. ticket is false without one, at and hold are 0. Besides:
--   costs, costs_text  by window, and as text
--   suffixes           its scopes; nil where nothing asks
--   done_at            when an earlier attempt of the same call did it, if one did
--   lease              its id as leases keep it, once it is needed
--   known              with `lost`: what the script remembers of the last call of the process
--   before             what the reservation cost, if that was corrected: the reply of decide.lua
-- and of its place, once that is read: queue, batch (its class), flow, tenant, weight, key.
--
-- requests is a table of
--   read(call, argv, at) -> r
--   read_place(r)                              reads what only a line needs
--   denied(call, r, list, now, fits, time) -> status, at, expected, latest, binds
--                                              the answer to a denied request without a place in line
--   line(call) -> J                            the verbs of line_join.lua, set up once
--   lease_id(call, r) -> bytes                 nil if no window holds what is granted
--   granted_before(call, r, before) -> status, at   1 if this call has granted it, 2 if its key
--                                              was granted, 10 if that was another request; or nil
--   take(call, r, list, now)                   takes the costs
--   replace(call, r, list, now)                gives back what was granted at r.at, once
--   fields(r, list, now, fits, time, latest, binds, nudge) -> text
--                                              the fields of the answer; fits: nil without windows
--   look_again(call, r)                        makes nodes of its scopes due, where flows wait
--
-- Of the call, two fields belong to decide.lua and its verbs:
--   line    the verbs of line_join.lua, if the call has set them up
--   dirty   whether something has changed that must not be done twice

local requests
do
local KEPT = 60000 -- ms for which a repeated request is recognised
local SOON = 100000 -- us after which tickets that wait for slots may have gone
local plain -- see read

local function new_request(ticket)
  return {op = '', costs = false, costs_text = '', ticket = ticket, place = '', at = 0, hold = 0}
end

requests = {
  -- One table serves for all requests that nothing keeps: plain ones, without a line.
  read = function(call, argv, at)
    local costs_text, ticket, place, more = argv[at + 1], argv[at + 2], argv[at + 3], argv[at + 4]
    local r
    if ticket ~= '' or more ~= '' or call.line then
      r = new_request(ticket ~= '' and ticket)
      if more ~= '' then read_fields(more, r) end
      if call.line or place ~= '' or more ~= '' then
        r.suffixes = {}
        for i = 1, #call.scopes do r.suffixes[i] = argv[at + 4 + i] end
      end
    else
      plain = plain or new_request(false)
      r = plain
    end
    r.op, r.costs_text, r.place = argv[at], costs_text, place
    r.costs = (call.texts[costs_text] or windows.costs_of(call, costs_text)).windows
    return r
  end,

  read_place = function(r)
    if r.flow or r.place == '' then return end
    r.flow, r.tenant, r.weight, r.key = match(r.place, '^(%S+) (%S+) (%S+) (%S+)$')
    r.queue = match(r.flow, '^[^|]*')
    r.batch = sub(r.queue, -1) == '!'
  end,

  denied = function(call, r, list, now, fits, time)
    local latest, binds, earliest, longest = time, 0, now, now
    for i = 1, #call.windows do
      if fits[i] > longest then longest, binds = fits[i], i end
      if not call.windows[i].algorithm.release then
        earliest = max(earliest, fits[i])
      elseif fits[i] > now and list[call.scope_of[i]].states[i].hold == 0 then
        latest = 0 -- nobody knows how long slots are held
      end
    end
    if call.line then
      requests.read_place(r)
      local low, high, by = call.line.expect(r, list, now, fits)
      if low > time then time, binds = low, by end
      latest = high > 0 and latest > 0 and max(latest, high) or 0
      -- Everything fits, and others wait for slots.
      if time <= now then time, latest = now + SOON, max(latest, now + SOON) end
    end
    return windows.too_late(r, now, time, latest, earliest) or 0, call.now, time, latest, binds
  end,

  line = function(call)
    if not call.line then
      windows.complete(call)
      local new_line, new_join = line_files()
      call.line = new_join(new_line(call))
      -- Otherwise decide.lua reads ahead what its requests need.
      if call.waiting == 0 then call.line.read_line() end
    end
    return call.line
  end,

  lease_id = function(call, r)
    if call.leases and not r.lease then r.lease = windows.lease_bytes(r.id) end
    return r.lease
  end,

  granted_before = function(call, r, before)
    if before == 1 then return 1, r.done_at end
    local granted = r.once and redis.call('GET', call.P .. 'n:' .. r.once)
    if not granted then return nil end
    local at, digest = match(granted, '^(%d+) (.*)$')
    if digest ~= r.digest then return 10, call.now end
    return 2, at + 0
  end,

  take = function(call, r, list, now)
    windows.take(call, list, r.costs, now, r.hold, call.leases and requests.lease_id(call, r))
    call.dirty = true
    if not r.once then return end
    redis.call('SET', call.P .. 'n:' .. r.once, format('%d ', now) .. r.digest, 'PX', KEPT)
    local state_key = call.P .. 'n:' .. r.id -- see reservation.lua
    if redis.call('EXISTS', state_key) == 1 then
      redis.call('SET', state_key, format('at=%d again=1', now), 'KEEPTTL')
    end
  end,

  replace = function(call, r, list, now)
    local id = r.replaces or r.id
    local state_key = call.P .. 'n:' .. id
    if redis.call('EXISTS', state_key) == 1 then return end
    windows.complete(call)
    windows.give_back(call, list, r.costs, now, r.at, call.leases and windows.lease_bytes(id))
    -- A late cancel, or another such request, gives back nothing.
    redis.call('SET', state_key, format('at=%d again=1', now), 'PX', KEPT)
    call.dirty = true
    requests.look_again(call, r)
  end,

  fields = function(r, list, now, fits, time, latest, binds, nudge)
    local call, text = list[1].call, format('time=%d', time)
    if latest and latest ~= time then text = text .. format(' latest=%d', latest) end
    if binds and binds ~= 0 then text = text .. format(' binds=%d', binds) end
    if now > call.now then text = text .. format(' behind=%d', now - call.now) end
    if nudge == 1 then text = text .. ' nudge=1' end
    if r.before then text = text .. ' before:' .. r.before end
    if fits then
      local times = {nil, nil}
      for i = 1, #call.windows do times[i] = format('%d', fits[i] or 0) end
      text = text .. ' fits:' .. concat(times, ',')
    end
    for s = 1, #list do
      if list[s].upstream then return text .. ' ' .. upstream().said(list, now) end
    end
    return text
  end,

  look_again = function(call, r)
    if call.line then call.line.look_again(r.suffixes) end
  end,
}
end
