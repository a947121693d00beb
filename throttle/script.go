package throttle

import (
	_ "embed"
	"maps"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"
)

//go:embed lua/state.lua
var stateLua string

//go:embed lua/windows.lua
var windowsLua string

//go:embed lua/reserve.lua
var reserveLua string

//go:embed lua/cancel.lua
var cancelLua string

// newScript puts a script together from the parts that all share and its own body.
func newScript(body string) *redis.Script {
	parts := []string{stateLua, "local algorithms = {}\n"}
	for _, name := range slices.Sorted(maps.Keys(algorithms)) {
		parts = append(parts, algorithms[name].lua)
	}
	parts = append(parts, windowsLua, body)
	return redis.NewScript(strings.Join(parts, "\n"))
}
