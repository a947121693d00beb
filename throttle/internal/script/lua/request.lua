-- request.lua: reads one request of a call. Most calls do not need the functions of request_more.lua.
--
-- A request r is a table with the values and fields of decide.lua that were sent. What was not sent is nil, but for
-- ticket, which is false then, and at and hold, which are 0. It also has:
--   costs, costs_text  by window, and as text
--   suffixes           the keys of its scopes; nil if r is `plain`, below
--   paused, whose      by decide.lua: when operators' pause ends, if one is in force, and whose it is (request.go)
--   unlimited          by decide.lua: its tenant's Settings say so
--   known              if `lost` is set: the record of the last call of the process
--   old_costs          the reservation's costs until this request, by window, if they were corrected
-- and of its line part, if the call has a line: queue, batch (its class), flow, tenant, weight, key.

local RECORD_MS = 60000 -- for which a repeated call is recognised, and a reservation's fate kept at least

-- Requests with neither ticket nor fields nor a line share one table, as nothing keeps them.
local plain = {op = '', costs = false, costs_text = '', ticket = false, line_part = '', at = 0, hold = 0}

local function read_line_part(r)
  if r.flow or r.line_part == '' then return end
  r.flow, r.queue, r.tenant, r.weight, r.key = match(r.line_part, '^(([^|]*)%S+) (%S+) (%S+) (%S+)$')
  r.batch = byte(r.queue, -1) == 33 -- "!", with which the names of batches' sides end
end

local function read_request(call, argv, from)
  local costs_text, ticket, part, more = argv[from + 1], argv[from + 2], argv[from + 3], argv[from + 4]
  local r = plain
  if ticket ~= '' or more ~= '' or call.line then
    r = { -- with the fields of its line part, as a table that grows is copied
      op = '', costs = false, costs_text = '', ticket = ticket ~= '' and ticket, line_part = '', at = 0, hold = 0,
      suffixes = {unpack(argv, from + 5, from + 4 + #call.scopes)},
      flow = nil, tenant = nil, weight = nil, key = nil, queue = nil, batch = nil,
    }
    if more ~= '' then
      for name, value in pairs(cjson.decode(more)) do r[name] = value end
    end
  end
  r.op, r.costs, r.costs_text, r.line_part = argv[from], windows.costs_of(call, costs_text).windows, costs_text, part
  if call.line then read_line_part(r) end
  return r
end
