package throttle

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	lua "github.com/yuin/gopher-lua"
	"github.com/yuin/gopher-lua/parse"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle/internal/algorithm"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

// header is the comment that a file begins with, and code is what is no comment.
func header(text string) string {
	var lines []string
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "--") {
			break
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "")
}

var comment = regexp.MustCompile(`(?m)--.*$`)

func code(text string) string { return comment.ReplaceAllString(text, "") }

// one returns what the pattern's group matches, in the one place where it does.
func one(t *testing.T, text, pattern string) string {
	t.Helper()
	matches := regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1)
	expect.Require(t, len(matches) == 1, len(matches), "matches of", pattern, "in", text)
	return matches[0][1]
}

// names are those of a list such as "used (units), fits (us, 0 for at once)".
func names(list string) []string {
	list = regexp.MustCompile(`\s*\([^)]*\)`).ReplaceAllString(strings.TrimSpace(list), "")
	return strings.Split(list, ", ")
}

// all returns what the pattern's first group matches, in order.
func all(text, pattern string) (found []string) {
	for _, match := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
		found = append(found, match[1])
	}
	return found
}

// tags returns the names by which calls carry the fields of a struct, and of the structs in it.
func tags(t reflect.Type) (names []string) {
	for i := range t.NumField() {
		f := t.Field(i)
		if f.Type.Kind() == reflect.Pointer {
			f.Type = f.Type.Elem()
		}
		if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "" && name != "-" {
			names = append(names, name)
		}
		if f.Type.Kind() == reflect.Struct {
			names = append(names, tags(f.Type)...)
		}
	}
	return names
}

// testWindow is a window that counts by the algorithm, with what it takes.
func testWindow(name Algorithm) Window {
	w := Window{Algorithm: name, Name: "w", Limit: 7, Period: time.Minute, Margin: time.Second}
	switch name {
	case AlgorithmCalendar:
		w.Period, w.Resets = 0, "@daily"
	case AlgorithmConcurrency:
		w.Period, w.Margin = 0, 0
	}
	return w
}

// testPolicy has one window of each algorithm, in as many scopes.
func testPolicy() Policy {
	p := Policy{Name: "p"}
	for i, name := range slices.Sorted(maps.Keys(algorithm.ByName)) {
		w := testWindow(Algorithm(name))
		w.Name += fmt.Sprint(i)
		w.Per = []string{"tenant", "user", "ip", "key", "app", "org", "plan", "site"}[:i+1]
		p.Windows = append(p.Windows, w)
	}
	return p
}

// A spy notes what go-redis is asked to run, and what comes back.
type spy struct{ calls, replies [][]any }

func (s *spy) see(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
	err := next(ctx, cmd)
	if sent, ok := cmd.(*redis.Cmd); ok && err == nil {
		s.calls = append(s.calls, sent.Args())
		reply, _ := sent.Slice()
		s.replies = append(s.replies, reply)
	}
	return err
}

// What the headers say of KEYS, ARGV and the reply is what Go sends and reads.
func TestHeadersOfScripts(t *testing.T) {
	client := redis.NewClient(&redis.Options{Addr: miniredis.RunT(t).Addr()})
	defer client.Close()
	spied := &spy{}
	client.AddHook(hooktest.Hook(spied.see))
	p := testPolicy()
	l := expect.Got(New(Config{Client: client, Policies: []Policy{p}}))(t)
	r := Request{Policy: "p", Tenant: "acme", Attributes: map[string]string{"user": "bob", "ip": "1", "key": "k", "app": "a", "org": "o", "plan": "p", "site": "s"}}
	joining := r
	joining.Ticket, joining.Key = Ticket{Queue: "q", ID: "1"}, "key"
	d := expect.Got(l.Reserve(t.Context(), r))(t)
	expect.Must(t, expect.ErrOf(d.Reservation.Cancel(t.Context())))
	expect.Must(t, expect.ErrOf(l.Line("p").Join(t.Context(), []Request{joining})))
	taken, err := l.Line("p").Take(t.Context(), TakeOptions{Queues: map[string]int{"q": 1, "r": 1}, Max: 3})
	expect.Require(t, err == nil && len(taken.Tickets) == 1, taken, err)
	expect.Require(t, len(spied.calls) >= 4, len(spied.calls), "scripts ran")
	windows, decide, take := script.File("windows"), script.File("decide"), script.File("take")

	// The header of all calls: now, process, seq, the policy, its pause and its windows' lists.
	headerArgs := all(header(windows), `(?m)(?:^-- ARGV  |^--       |   )(\d) [a-z]`)
	expect.That(t, slices.Equal(headerArgs, []string{"1", "2", "3", "4", "5", "6"}) && strings.Contains(code(decide), "ARGV, 7\n") &&
		strings.Contains(code(take), "call.now, 7\n"), "windows.lua: the header lists the arguments", headerArgs)
	var policy []any
	expect.Must(t, json.Unmarshal([]byte(fmt.Sprint(spied.calls[0][4+3])), &policy))
	read := all(code(windows), `\bw\[(\d)\]`)
	slices.Sort(read)
	expect.That(t, len(policy) == 5 && len(policy[1].([]any)[0].([]any)) == len(slices.Compact(read)), "argument 4", policy, "is read by", read)
	common := len(headerArgs)

	requests := all(header(decide), `(?m)^--   (\d) \w+ `)
	expect.That(t, slices.Equal(requests, []string{"1", "2", "3", "4", "5"}) &&
		strings.Contains(code(decide), " 5 + nscopes\n"),
		"decide.lua: the header lists the values", requests, "of a request")
	form := func(name string) int {
		return len(strings.Fields(one(t, header(decide), `(?m)^--   `+name+` {2,}((?:\S+ )*\S+)(?:  .*)?$`)))
	}
	for i, windows := range []int{len(p.Windows), len(p.Windows), 0} { // of Reserve, Cancel and Join
		args := spied.calls[i] // command, script, number of keys, key, arguments
		want := 4 + common + len(requests) + len(p.Windows)
		expect.That(t, len(args) == want && fmt.Sprint(args[2]) == "1", "call", i, "Go sends", len(args), "values, the headers say", want)
		want = form("answer") + form("window")*windows
		expect.That(t, len(spied.replies[i]) == want, "call", i, "decide.lua replies", len(spied.replies[i]), "values, the header says", want)
	}
	verbs := all(code(decide+script.File("verbs")), `(?m)^(?:  function verbs\.|  verbs\.|  )(\w+)(?: = function\(r|\(r)`)
	ops := []string{script.Reserve, script.Exempt, script.Observe, script.Peek, script.Join, script.Leave, script.PutBack, script.Cancel, script.Settle,
		script.Release, script.Renew, script.Pause, script.Resume, script.Remaining, script.Refresh, script.Expect}
	slices.Sort(verbs)
	slices.Sort(ops)
	expect.That(t, slices.Equal(verbs, ops), "the scripts have the verbs", verbs, "Go asks for", ops)

	// The scripts read the fields that Go writes, and write those that Go reads.
	text := code(script.Text([]string{"sliding"}, "decide"))
	for _, c := range []struct {
		value any
		form  string // of a field in the scripts
	}{{script.Request{}, `\b(?:r|refused|left|settings)\.(\w+)`}, {script.Answer{}, `(?:answer\.|[ {])(\w+) = (?:[^n]|n[^i])`}} {
		for _, tag := range tags(reflect.TypeOf(c.value)) {
			expect.That(t, slices.Contains(all(text, c.form), tag), "no script has the field", tag, c.value)
		}
	}

	arguments := all(header(take), `(?m)^--   (\d) \w+ `)
	took := spied.calls[len(spied.calls)-1]
	expect.That(t, len(arguments) == 4 && len(took) == 4+common+len(arguments)+2,
		"take.lua: the header lists", arguments, "Go sends", len(took), "values")
	listed := strings.Fields(one(t, header(take), `(?m)^--   text   "([a-z ]*)"`))
	first := names(one(t, header(take), `(?m)^-- reply (.*), then for each ticket its text, when`))
	took = spied.replies[len(spied.replies)-1]
	expect.That(t, len(took) == len(first)+2+len(p.Windows) &&
		len(strings.Fields(fmt.Sprint(took[len(first)]))) == len(listed),
		"take.lua replies", took, "the header lists", first, listed)
}

// What the headers of the algorithms say of parameters, functions and bytes is what stands below.
func TestHeadersOfAlgorithms(t *testing.T) {
	list := header(script.File("scope"))
	list = list[strings.Index(list, "is a table of"):]
	functions := map[string][]string{}
	for _, f := range regexp.MustCompile(`\b([a-z_]+)\(((?:st|window|p1)\b[a-z0-9, ]*)\)`).FindAllStringSubmatch(list, -1) {
		functions[f[1]] = strings.Split(f[2], ", ")
	}
	for name, a := range algorithm.ByName {
		text := script.File(a.File)
		parameters := all(header(text), `[ ,](p\d) \w+ \(`)
		for i, p := range a.Params(testWindow(Algorithm(name)).withDefaults().numbers()) {
			letter := fmt.Sprintf("p%d", i+1)
			listed, read := slices.Contains(parameters, letter), strings.Count(code(text), letter+",")+strings.Count(code(text), letter+")")+strings.Count(code(text), letter+" ") > 1
			sent := p != 0 || i == 3 && a.File == algorithm.Calendar.File
			expect.That(t, listed == sent && listed == read, name, letter, "is in the header", listed, "read", read, "sent", sent)
		}

		found := map[string]bool{}
		for _, f := range regexp.MustCompile(`(?m)^  ([a-z_]+) = (?:function\(([a-z0-9, ]*)\)|[a-z_]+,$)`).FindAllStringSubmatch(text, -1) {
			if strings.HasSuffix(f[0], " = true,") {
				continue // a trait
			}
			found[f[1]] = true
			takes, given := strings.Split(f[2], ", "), functions[f[1]]
			expect.That(t, given != nil, name, "has the function", f[1], "which scope.lua does not list")
			expect.That(t, f[2] == "" || len(takes) <= len(given) && slices.Equal(takes, given[:len(takes)]),
				name, f[1], "takes", takes, "scope.lua says", given)
		}
		for f := range functions {
			optional := slices.Contains([]string{"grants", "kept_until", "opens_at", "release", "renew"}, f)
			expect.That(t, optional || found[f], name, "does not have the function", f, "which scope.lua lists")
		}
		expect.Equal(t, one(t, code(text), `algorithms\['(.)'\] = `), a.Kind, name, "the kind is", "in Lua", "in Go")
		expect.Equal(t, found["release"], a.Leases, name, "leases are", "in Lua", "in Go")
	}
	expect.Equal(t, len(functions), 11, "scope.lua lists", "functions")
}

// sizes adds up a list such as "format(1) last(7)"; what has no number counts nothing.
func sizes(list string) int {
	sum := 0
	for _, n := range regexp.MustCompile(`\((\d+)\)`).FindAllStringSubmatch(list, -1) {
		size, _ := strconv.Atoi(n[1])
		sum += size
	}
	return sum
}

func TestHeadersOfState(t *testing.T) {
	scope := header(script.File("scope"))
	value, section := one(t, scope, `(?m)^--   value    (.*)$`), one(t, scope, `(?m)^--   section  (.*)$`)
	for name, a := range algorithm.ByName {
		server := miniredis.RunT(t)
		client := redis.NewClient(&redis.Options{Addr: server.Addr()})
		defer client.Close()
		w := testWindow(Algorithm(name))
		w.Name = "window"
		l := expect.Got(New(Config{Client: client, Policies: []Policy{{Name: "p", Windows: []Window{w}}}}))(t)
		expect.Must(t, expect.ErrOf(l.Reserve(t.Context(), Request{Policy: "p", Tenant: "acme"})))
		got := expect.Got(server.Get("sluice:{p}:w:tenant:acme"))(t)
		text := header(script.File(a.File))
		want := sizes(value) + sizes(section) + len("window") + sizes(one(t, text, `(?m)^--   payload     (.*)$`))
		for _, repeated := range all(text, `(?m)^--   payload     .* (\w+)\*$`) {
			want += sizes(one(t, text, `(?m)^--   `+repeated+` {2,}(.*)$`))
		}
		expect.Equal(t, len(got), want, name, "one grant takes", "bytes, the headers say")
	}
}

// What miniredis accepts and Redis does not, and what miniredis does not have.
func TestScriptsUseNothingSpecial(t *testing.T) {
	allowed := []string{"ARGV", "KEYS", "cjson", "ipairs", "math", "next", "pairs", "redis", "setmetatable", "string", "table", "tonumber", "type", "unpack"}
	var files []string
	for _, a := range algorithm.ByName {
		files = append(files, a.File)
	}
	slices.Sort(files)
	for _, name := range []string{"decide", "take"} {
		text := script.Text(files, name)
		for _, word := range []string{"goto", "struct", "bit", "cmsgpack", "pcall", "KEYS *=", "ARGV *=", `redis\.replicate_commands`} {
			expect.Equal(t, regexp.MustCompile(`\b`+word+`\b`).FindString(code(text)), "", name, "uses")
		}
		chunk := expect.Got(parse.Parse(strings.NewReader(text), name))(t)
		proto := expect.Got(lua.Compile(chunk, name))(t)
		read := map[string]bool{}
		walk(proto, func(p *lua.FunctionProto, line, op int, global string) {
			switch op {
			case lua.OP_SETGLOBAL:
				t.Errorf("%s, line %d of %d: sets the global %s", name, line, strings.Count(text, "\n"), global)
			case lua.OP_GETGLOBAL:
				expect.That(t, slices.Contains(allowed, global) || read[global], name, "line", line, "reads the global", global)
				read[global] = true
			}
		})
		expect.That(t, read["redis"] && read["KEYS"], name, "globals not seen", read)
	}
}

// walk visits every instruction, with the constant that it names.
func walk(p *lua.FunctionProto, visit func(p *lua.FunctionProto, line, op int, constant string)) {
	for i, instruction := range p.Code {
		constant := ""
		if index := int(instruction & 0x3ffff); index < len(p.Constants) {
			constant = p.Constants[index].String()
		}
		visit(p, p.DbgSourcePositions[i], int(instruction>>26), constant)
	}
	for _, inner := range p.FunctionPrototypes {
		walk(inner, visit)
	}
}
