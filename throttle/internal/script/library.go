package script

import (
	"embed"
	"strings"

	"github.com/redis/go-redis/v9"
)

//go:embed lua
var files embed.FS

// The files of a script, besides its algorithms and its body. A file uses earlier files, and later ones only
// through `made_once`. Files of `more` and `line` are in the functions extras and line_files, which few calls call.
const (
	base = " scope windows request"
	more = "upstream request_more verbs"
	line = "line_appointments line_units line_fair line_heads line_order line " +
		"line_eta line_join line_take"
)

// script returns the script of all policies with the same algorithms. Other algorithms would cost time at every call.
func (r *Runner) script(p *Policy, body string) *redis.Script {
	name := body + " " + strings.Join(p.Algorithms, " ")
	made, known := r.made.Load(name)
	if !known {
		text := Text(p.Algorithms, body)
		if r.Edit != nil {
			text = r.Edit(text)
		}
		made, _ = r.made.LoadOrStore(name, redis.NewScript(text))
	}
	return made.(*redis.Script)
}

// Text puts a script together. What follows codec is one function, whose closures capture the names of codec cheaply.
func Text(algorithms []string, body string) string {
	return texts("codec") + "return (function()\n" + texts(strings.Join(algorithms, " ")+base) +
		"function extras(call)\nlocal line_files\n" + texts(more) +
		"function line_files(call)\n" + texts(line) +
		"return {expire = expire, new_join = new_join, new_line = new_line, new_take = new_take}\nend\n" +
		"return {denied = denied, fields = fields, line_files = line_files, line_of = line_of, replace = replace, " +
		"upstream = upstream, verb = verb}\nend\n" +
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

// File returns the text of a Lua file, by its name without ".lua".
func File(name string) string {
	text, _ := files.ReadFile("lua/" + name + ".lua") // it is part of the program
	return string(text)
}
