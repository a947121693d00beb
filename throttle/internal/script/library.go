package script

import (
	"embed"
	"fmt"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"
)

//go:embed lua
var files embed.FS

// The files of a script besides those of its algorithms. A file uses only what stands before it.
var (
	shared = []string{"scope", "upstream", "windows"}
	line   = []string{
		"line_appointments", "line_units", "line_fair", "line_order", "line_places", "line_write", "line",
		"line_eta", "line_leave", "line_join",
	}
	deciding = []string{"request", "later_verbs", "reservation", "decide"}
	taking   = []string{"line_lists", "line_take", "take"}
)

// scripts are shared by all policies that count by the same algorithms and have the same constants.
// A script holds no other algorithms: each costs time at every call.
type scripts struct{ decide, take *redis.Script }

// A Library makes every script once. Its zero value is ready. It is safe for concurrent use.
type Library struct {
	// Edit, if not nil, changes the text of every script: for tests.
	Edit func(text string) string

	// Prefix is what the keys of all policies begin with. It holds no brace.
	Prefix string

	mu   sync.Mutex
	made map[string]*scripts // by what of a policy is in their texts
}

func (l *Library) of(p *Policy) *scripts {
	l.mu.Lock()
	defer l.mu.Unlock()
	name := fmt.Sprint(strings.Join(p.Algorithms, " "), " ", p.BatchShare)
	made := l.made[name]
	if made == nil {
		made = &scripts{decide: l.script(p, "decide"), take: l.script(p, "take")}
		if l.made == nil {
			l.made = map[string]*scripts{}
		}
		l.made[name] = made
	}
	return made
}

func (l *Library) script(p *Policy, body string) *redis.Script {
	text := strings.Replace(Text(p.Algorithms, body), "SHARE = 0.05", fmt.Sprintf("SHARE = %.6f", p.BatchShare), -1)
	if l.Edit != nil {
		text = l.Edit(text)
	}
	return redis.NewScript(text)
}

// Text puts a script together. Most calls that decide find no line. So the files of lines stand in
// a function, which is called only if there is one.
func Text(algorithms []string, body string) string {
	parts := []string{File("codec"), "local algorithms = {}\n"}
	add := func(names ...string) {
		for _, name := range names {
			parts = append(parts, File(name))
		}
	}
	add(algorithms...)
	add(shared...)
	if body == "take" {
		add(line...)
		add(taking...)
	} else {
		parts = append(parts, "local function line_files()\n")
		add(line...)
		parts = append(parts, "return new_line, new_join\nend\n")
		add(deciding...)
	}
	return strings.Join(parts, "\n")
}

// File returns the text of a Lua file, by its name without ".lua".
func File(name string) string {
	text, err := files.ReadFile("lua/" + name + ".lua")
	if err != nil {
		panic(fmt.Sprintf("script: %v", err)) // the files are part of the program
	}
	return string(text)
}
