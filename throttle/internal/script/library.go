package script

import (
	"embed"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"
)

//go:embed lua
var files embed.FS

// The files of a script, besides those of its algorithms. A file uses only earlier files.
const (
	line = "line_appointments line_units line_fair line_places line_order line_write line "
	join = "line_eta line_join "
)

// Functions that most calls do not need stand in one, which is called once by calls that need them. It
// returns these.
const (
	extrasOfTake   = "new_join upstream"
	extrasOfDecide = "denied fields granted_before line_of read_place replace upstream verb"
)

// scripts are shared by all policies that count by the same algorithms and have the same constants.
// A script holds no other algorithms: each costs time at every call.
type scripts struct{ decide, take *redis.Script }

func (r *Runner) scriptsOf(p *Policy) *scripts {
	r.mu.Lock()
	defer r.mu.Unlock()
	name := fmt.Sprint(strings.Join(p.Algorithms, " "), " ", p.BatchShare)
	made := r.made[name]
	if made == nil {
		made = &scripts{decide: r.script(p, "decide"), take: r.script(p, "take")}
		if r.made == nil {
			r.made = map[string]*scripts{}
		}
		r.made[name] = made
	}
	return made
}

func (r *Runner) script(p *Policy, body string) *redis.Script {
	share := fmt.Sprintf("SHARE = %.6f", p.BatchShare)
	text := strings.ReplaceAll(Text(p.Algorithms, body), "SHARE = 0.05", share)
	if r.Edit != nil {
		text = r.Edit(text)
	}
	return redis.NewScript(text)
}

// Text puts a script together.
func Text(algorithms []string, body string) string {
	own := strings.Join(algorithms, " ")
	if body == "take" {
		return texts("codec", own, "scope windows", line) +
			function("extras", texts("upstream request_more", join), extrasOfTake) +
			texts("line_take take")
	}
	return texts("codec", own, "scope windows request") +
		function("extras", texts("upstream request_more")+
			function("line_files", texts(line, join), "new_join new_line")+
			texts("verbs"), extrasOfDecide) +
		texts("decide")
}

// texts returns the texts of files, by lists of their names.
func texts(names ...string) string {
	var b strings.Builder
	for _, name := range strings.Fields(strings.Join(names, " ")) {
		b.WriteString(File(name) + "\n")
	}
	return b.String()
}

// function returns a Lua function that returns a table of what it defines.
func function(name, text, returns string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "function %s(call)\n%sreturn {", name, text)
	for _, name := range strings.Fields(returns) {
		fmt.Fprintf(&b, "%[1]s = %[1]s, ", name)
	}
	return b.String() + "}\nend\n"
}

// File returns the text of a Lua file, by its name without ".lua".
func File(name string) string {
	text, err := files.ReadFile("lua/" + name + ".lua")
	if err != nil {
		panic(fmt.Sprintf("script: %v", err)) // the files are part of the program
	}
	return string(text)
}
