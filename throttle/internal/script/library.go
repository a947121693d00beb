package script

import (
	"embed"
	"os"
	"strings"

	"github.com/redis/go-redis/v9"
)

//go:embed lua
var files embed.FS

// skeleton is a script in which each $NAME stands for the text of lua/NAME.lua, and $BODY and $ALGORITHMS for those of
// its body and its algorithms. A file names earlier files' functions, and later ones' only for `made_once`. What follows
// codec is one function, whose closures capture the names of codec cheaply. Few calls call extras, and fewer line_files:
// Redis makes the functions in them only for these.
const skeleton = `$codec
return (function()
$ALGORITHMS $scope $windows $request
function extras(call)
local line_files
$upstream $request_more $verbs
function line_files(call)
$line_appointments $line_units $line_fair $line_heads $line_order $line $line_eta $line_join $line_take
return {new_join = new_join, new_line = new_line, new_take = new_take}
end
return {denied = denied, fields = fields, line_files = line_files, line_of = line_of, replace = replace,
  upstream = upstream, verb = verb}
end
$BODY
end)()
`

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

// Text puts a script together.
func Text(algorithms []string, body string) string {
	names := strings.NewReplacer("$ALGORITHMS", "$"+strings.Join(algorithms, " $"), "$BODY", "$"+body)
	return os.Expand(names.Replace(skeleton), File)
}

// File returns the text of a Lua file, by its name without ".lua".
func File(name string) string {
	text, _ := files.ReadFile("lua/" + name + ".lua") // it is part of the program
	return string(text)
}
