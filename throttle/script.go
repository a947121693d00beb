package throttle

import (
	_ "embed"
	"slices"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"
)

//go:embed lua/state.lua
var stateLua string

//go:embed lua/told.lua
var toldLua string

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

//go:embed lua/grant.lua
var grantLua string

//go:embed lua/settle.lua
var settleLua string

// scripts are those of all policies whose windows count by the same algorithms: what a script does
// not need it does not have to set up at every call.
type scripts struct {
	grant           *redis.Script // nil where reserve has to do all
	reserve, settle *redis.Script
}

// A scriptCache makes each script once.
type scriptCache struct {
	mu   sync.Mutex
	made map[string]*scripts // by the kinds of their algorithms
	edit func(string) string // for tests
}

func (sc *scriptCache) of(windows []Window) *scripts {
	var used []Algorithm
	for _, w := range windows {
		used = append(used, w.Algorithm)
	}
	slices.Sort(used)
	used = slices.Compact(used)
	key := ""
	for _, name := range used {
		key += algorithms[name].kind
	}
	sc.mu.Lock()
	defer sc.mu.Unlock()
	if sc.made[key] == nil {
		if sc.made == nil {
			sc.made = map[string]*scripts{}
		}
		made := &scripts{
			reserve: sc.script(scriptText(used, reserveLua, waitLua)),
			settle:  sc.script(scriptText(used, settleLua, freedLua)),
		}
		if !slices.Contains(used, Calendar) && !slices.Contains(used, Concurrency) {
			made.grant = sc.script(grantLua)
		}
		sc.made[key] = made
	}
	return sc.made[key]
}

func (sc *scriptCache) script(text string) *redis.Script {
	if sc.edit != nil {
		text = sc.edit(text)
	}
	return redis.NewScript(text)
}

// scriptText puts a script together: the parts that all share, its own body, and behind that,
// because most calls end before it, the line and what follows for those that found one.
func scriptText(used []Algorithm, body, rest string) string {
	parts := []string{stateLua, "local algorithms = {}\n"}
	for _, name := range used {
		parts = append(parts, algorithms[name].lua)
	}
	parts = append(parts, toldLua, windowsLua, body, lineLua, rest)
	return strings.Join(parts, "\n")
}
