-- freed.lua: the rest of settle.lua, when somebody waits for what was given back.

for _, suffix in ipairs(mine.suffixes) do due(suffix, now) end
return finish(status, now)
