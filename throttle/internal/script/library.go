package script

import (
	"embed"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"
)

//go:embed lua
var files embed.FS

// The files of a script, besides those of its algorithms and its own. A file uses only earlier files. The
// ones after the first stand in functions, as most calls need neither what few calls need nor a line.
const (
	base = " scope windows request"
	more = "upstream request_more verbs"
	line = "line_appointments line_units line_fair line_places line_order line_write line " +
		"line_eta line_join line_take"
)

// scripts are shared by all policies that count by the same algorithms. A script holds no other algorithms:
// each costs time at every call.
type scripts struct{ decide, take *redis.Script }

func (r *Runner) scriptsOf(p *Policy) *scripts {
	name := strings.Join(p.Algorithms, " ")
	made, known := r.made.Load(name)
	if !known {
		made, _ = r.made.LoadOrStore(name, &scripts{decide: r.script(p, "decide"), take: r.script(p, "take")})
	}
	return made.(*scripts)
}

func (r *Runner) script(p *Policy, body string) *redis.Script {
	text := Text(p.Algorithms, body)
	if r.Edit != nil {
		text = r.Edit(text)
	}
	return redis.NewScript(text)
}

// Text puts a script together. Its body is a function, as names of the function outside cost less to capture.
func Text(algorithms []string, body string) string {
	return texts("codec") + "return (function()\n" + texts(strings.Join(algorithms, " ")+base) +
		luaFunction("extras",
			texts(more)+luaFunction("line_files", texts(line), "expire new_join new_line new_take"),
			"denied fields line_of replace upstream verb") +
		texts(body) + "end)()\n"
}

// texts returns the texts of files, by their names.
func texts(names string) string {
	var b strings.Builder
	for name := range strings.FieldsSeq(names) {
		b.WriteString(File(name) + "\n")
	}
	return b.String()
}

// luaFunction returns the text of a Lua function that returns a table of what it defines.
func luaFunction(name, text, returns string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "function %s(call)\n%sreturn {", name, text)
	for name := range strings.FieldsSeq(returns) {
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
