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

//go:embed lua/line.lua
var lineLua string

//go:embed lua/wait.lua
var waitLua string

//go:embed lua/freed.lua
var freedLua string

//go:embed lua/lead.lua
var leadLua string

//go:embed lua/reserve.lua
var reserveLua string

//go:embed lua/cancel.lua
var cancelLua string

// newScript puts a script together: the parts that all share, its own body, and behind that,
// because most calls end before it, the line and what follows for those that found one.
func newScript(body, rest string) *redis.Script { return redis.NewScript(scriptText(body, rest)) }

func scriptText(body, rest string) string {
	parts := []string{stateLua, "local algorithms = {}\n"}
	for _, name := range slices.Sorted(maps.Keys(algorithms)) {
		parts = append(parts, algorithms[name].lua)
	}
	parts = append(parts, windowsLua, body, lineLua, rest)
	return strings.Join(parts, "\n")
}
