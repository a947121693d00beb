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

func newScript(body string) *redis.Script { return redis.NewScript(scriptText(body)) }

// scriptText puts a script together from the parts that all share and its own body.
func scriptText(body string) string {
	parts := []string{stateLua, "local algorithms = {}\n"}
	for _, name := range slices.Sorted(maps.Keys(algorithms)) {
		parts = append(parts, algorithms[name].lua)
	}
	parts = append(parts, windowsLua, body)
	return strings.Join(parts, "\n")
}
