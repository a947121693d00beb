package expect

import lua "github.com/yuin/gopher-lua"

// miniredis makes a stack for each call of a script, by default of 110 kB. The race detector watches it
// all, so that tests took a third longer. A script that needs more than this, such as for unpack, fails.
func init() { lua.RegistrySize, lua.CallStackSize = 2048, 64 }
