package throttle

import (
	"context"
	"fmt"
	"maps"
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
)

var (
	bodies = map[string]string{"reserve.lua": reserveLua, "settle.lua": settleLua}
	rests  = map[string]string{"reserve.lua": waitLua, "settle.lua": freedLua}
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
	if len(matches) != 1 {
		t.Fatalf("%d matches of %s in\n%s", len(matches), pattern, text)
	}
	return matches[0][1]
}

func number(t *testing.T, text, pattern string) int {
	t.Helper()
	n, err := strconv.Atoi(one(t, text, pattern))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// names are those of a list such as "used (units), fits (us, 0 for at once)".
func names(list string) []string {
	list = regexp.MustCompile(`\s*\([^)]*\)`).ReplaceAllString(strings.TrimSpace(list), "")
	return strings.Split(list, ", ")
}

// testWindow is a window that counts by the algorithm, with what it takes.
func testWindow(name Algorithm) Window {
	w := Window{Algorithm: name, Name: "w", Limit: 7, Period: time.Minute, Margin: time.Second}
	switch name {
	case Calendar:
		w.Period, w.Resets = 0, "@daily"
	case Concurrency:
		w.Period, w.Margin = 0, 0
	case Fixed:
		w.Anchor = AnchorFirstUse
	}
	return w
}

// testPlan is a policy of one window of each algorithm, in as many scopes.
func testPlan(t *testing.T) *plan {
	t.Helper()
	p := Policy{Name: "p"}
	for i, name := range slices.Sorted(maps.Keys(algorithms)) {
		w := testWindow(name)
		w.Name += fmt.Sprint(i)
		w.Per = []string{"tenant", "user", "ip", "key", "app"}[:i+1]
		p.Windows = append(p.Windows, w)
	}
	pl, err := newPlan(p)
	if err != nil {
		t.Fatal(err)
	}
	return pl
}

// spy notes what go-redis is asked to run, and what comes back.
type spy struct{ calls, replies [][]any }

func (s *spy) DialHook(next redis.DialHook) redis.DialHook { return next }

func (s *spy) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (s *spy) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if script, ok := cmd.(*redis.Cmd); ok && err == nil {
			s.calls = append(s.calls, script.Args())
			reply, _ := script.Slice()
			s.replies = append(s.replies, reply)
		}
		return err
	}
}

// What the headers say of KEYS, ARGV and the reply is what Go sends and reads.
func TestHeadersOfScripts(t *testing.T) {
	stride := number(t, code(windowsLua), `local STRIDE = (\d+)`)
	fields := names(one(t, header(windowsLua), `(?m)^--   (scope .*)$`))
	if len(fields) != stride {
		t.Errorf("windows.lua: STRIDE is %d, the header lists %d values: %q", stride, len(fields), fields)
	}
	word := map[int]string{9: "nine"}[stride]
	pl := testPlan(t)
	c, err := pl.newCall(Request{Policy: "p", Tenant: "acme", Nonce: "n", Attributes: map[string]string{"user": "bob", "ip": "1", "key": "k", "app": "a"}}, Tenant{})
	if err != nil {
		t.Fatal(err)
	}
	if got := len(c.arguments(0)) - 1; got != stride*len(pl.Windows) {
		t.Errorf("Go sends %d values for %d windows, STRIDE is %d", got, len(pl.Windows), stride)
	}
	for _, index := range regexp.MustCompile(`ARGV\[i \+ (\d+)\]`).FindAllStringSubmatch(code(windowsLua), -1) {
		if n, _ := strconv.Atoi(index[1]); n >= stride {
			t.Errorf("windows.lua reads beyond a window's values: %s", index[0])
		}
	}

	server := miniredis.RunT(t)
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer client.Close()
	spied := &spy{}
	client.AddHook(spied)
	l, err := New(Config{Client: client, Policies: []Policy{pl.Policy}})
	if err != nil {
		t.Fatal(err)
	}
	d, err := l.Reserve(t.Context(), c.request)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Cancel(t.Context(), d.Reservation); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Peek(t.Context(), c.request); err != nil {
		t.Fatal(err)
	}
	if len(spied.calls) != 3 {
		t.Fatalf("%d scripts ran, want 3", len(spied.calls))
	}
	for i, name := range []string{"reserve.lua", "settle.lua", "reserve.lua"} {
		head, body := header(bodies[name]), code(bodies[name])
		windows := number(t, body, `local WINDOWS = (\d+)`)

		own := regexp.MustCompile(`(?m)^--(?: ARGV |      ) (\d+) (\w+): `).FindAllStringSubmatch(head, -1)
		for j, line := range own {
			if line[1] != fmt.Sprint(j+1) {
				t.Errorf("%s: the header's argument %d is numbered %s", name, j+1, line[1])
			}
			if !strings.Contains(body+code(lineLua), "ARGV["+line[1]+"]") {
				t.Errorf("%s: nothing reads ARGV[%s], %s", name, line[1], line[2])
			}
		}
		for _, index := range regexp.MustCompile(`ARGV\[(\d+)\]`).FindAllStringSubmatch(body, -1) {
			if n, _ := strconv.Atoi(index[1]); n > len(own) {
				t.Errorf("%s reads %s, which its header does not know", name, index[0])
			}
		}
		if want := fmt.Sprintf("--       %d.. %s values a window (windows.lua)\n", len(own)+1, word); windows != len(own)+1 || !strings.Contains(head, want) {
			t.Errorf("%s: WINDOWS is %d after %d arguments, and the header must say %q", name, windows, len(own), want)
		}

		keys := len(pl.scopes) + 2
		args := spied.calls[i] // command, script, number of keys, keys, arguments
		if fmt.Sprint(args[2]) != fmt.Sprint(keys) || len(args) != 3+keys+len(own)+stride*len(pl.Windows) {
			t.Errorf("%s is sent %d values with %v keys; the headers say %d keys and %d + %d x %d arguments",
				name, len(args)-3, args[2], keys, len(own), len(pl.Windows), stride)
		}

		first := regexp.MustCompile(`(?m)^--(?: reply|      ) (\w+): `).FindAllStringSubmatch(head[strings.Index(head, "reply"):], -1)
		reply := []string{one(t, head, `(?m)^-- reply (\w+): `)}
		for _, line := range first {
			reply = append(reply, line[1])
		}
		each := names(one(t, head, `(?m)^--       then for every window: (.*)$`))
		if len(reply) != 4 || len(each) != 3 || len(spied.replies[i]) != len(reply)+len(each)*len(pl.Windows) {
			t.Errorf("%s replies %d values; the header names %q and for each of %d windows %q",
				name, len(spied.replies[i]), reply, len(pl.Windows), each)
		}
	}
}

// What the headers of the algorithms say of parameters, functions and bytes is what stands below.
func TestHeadersOfAlgorithms(t *testing.T) {
	list := header(windowsLua)
	list = list[strings.Index(list, "algorithms[kind] is a table of"):]
	functions := map[string][]string{}
	for _, f := range regexp.MustCompile(`\b([a-z_]+)\(((?:w|payload)[a-z, ]*)\)`).FindAllStringSubmatch(list, -1) {
		functions[f[1]] = strings.Split(f[2], ", ")
	}
	for name, a := range algorithms {
		parameters := names(one(t, header(a.lua), `(?m)^--   parameters  (.*)$`))
		if len(parameters) != 4 {
			t.Errorf("%s: 4 parameters, the header names %q", name, parameters)
			continue
		}
		for i, p := range a.params(testWindow(name).WithDefaults()) {
			used := strings.Contains(code(a.lua), fmt.Sprintf("w.p%d", i+1)) || parameters[i] == "schedule" // which line.lua reads
			sent := p != 0 || parameters[i] == "ticks"                                                      // which Go sends in place of the number
			if unused := parameters[i] == "unused"; unused == used || unused == sent {
				t.Errorf("%s: p%d is %q in the header, read is %v, sent %d", name, i+1, parameters[i], used, p)
			}
		}

		found := map[string]bool{}
		for _, f := range regexp.MustCompile(`(?m)^  ([a-z_]+) = function\(([a-z, ]*)\)`).FindAllStringSubmatch(a.lua, -1) {
			found[f[1]] = true
			takes, given := strings.Split(f[2], ", "), functions[f[1]]
			if given == nil {
				t.Errorf("%s has the function %s, which windows.lua does not list", name, f[1])
			}
			if len(takes) > len(given) || !slices.Equal(takes, given[:len(takes)]) {
				t.Errorf("%s: %s takes %q, windows.lua says %q", name, f[1], takes, given)
			}
		}
		for f := range functions {
			if optional := slices.Contains([]string{"kept_until", "opens_at", "release", "renew"}, f); !optional && !found[f] {
				t.Errorf("%s does not have the function %s, which windows.lua lists", name, f)
			}
		}
		if got := one(t, code(a.lua), `algorithms\['(.)'\] = `); got != a.kind {
			t.Errorf("%s: the kind is %q in Lua, %q in Go", name, got, a.kind)
		}
	}
	if len(functions) != 13 {
		t.Errorf("windows.lua lists %d functions", len(functions))
	}
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
	value, section := one(t, header(stateLua), `(?m)^--   value    (.*)$`), one(t, header(stateLua), `(?m)^--   section  (.*)$`)
	for name, a := range algorithms {
		server := miniredis.RunT(t)
		client := redis.NewClient(&redis.Options{Addr: server.Addr()})
		defer client.Close()
		w := testWindow(name)
		w.Name, w.Anchor = "window", ""
		l, err := New(Config{Client: client, Policies: []Policy{{Name: "p", Windows: []Window{w}}}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.Reserve(t.Context(), Request{Policy: "p", Tenant: "acme"}); err != nil {
			t.Fatal(err)
		}
		got, err := server.Get("sluice:{p:acme}:w:tenant:acme")
		if err != nil {
			t.Fatal(err)
		}
		want := sizes(value) + sizes(section) + len("window") + sizes(one(t, header(a.lua), `(?m)^--   payload     (.*)$`))
		if strings.Contains(header(a.lua), "entry*") {
			want += map[Algorithm]int{Sliding: 8, Concurrency: sizes(one(t, header(a.lua), `(?m)^--   entry       (.*)$`))}[name]
		}
		if len(got) != want {
			t.Errorf("%s: one grant takes %d bytes, the headers say %d", name, len(got), want)
		}
	}
}

// What miniredis accepts and Redis does not, and what miniredis does not have.
func TestScriptsUseNothingSpecial(t *testing.T) {
	allowed := []string{"ARGV", "KEYS", "ipairs", "math", "pairs", "redis", "string", "table", "tonumber", "unpack"}
	texts := map[string]string{"grant.lua": grantLua}
	for name, body := range bodies {
		texts[name] = scriptText(slices.Sorted(maps.Keys(algorithms)), body, rests[name])
	}
	for name, text := range texts {
		for _, word := range []string{"goto", "cjson", "struct", "bit", "cmsgpack", "pcall", "KEYS *=", "ARGV *=", `redis\.replicate_commands`} {
			if found := regexp.MustCompile(`\b` + word + `\b`).FindString(code(text)); found != "" {
				t.Errorf("%s uses %s", name, found)
			}
		}
		chunk, err := parse.Parse(strings.NewReader(text), name)
		if err != nil {
			t.Fatal(err)
		}
		proto, err := lua.Compile(chunk, name)
		if err != nil {
			t.Fatal(err)
		}
		read := map[string]bool{}
		walk(proto, func(p *lua.FunctionProto, line, op int, global string) {
			switch op {
			case lua.OP_SETGLOBAL:
				t.Errorf("%s, line %d of %d: sets the global %s", name, line, strings.Count(text, "\n"), global)
			case lua.OP_GETGLOBAL:
				read[global] = true
			}
		})
		for global := range read {
			if !slices.Contains(allowed, global) {
				t.Errorf("%s reads the global %s", name, global)
			}
		}
		if !read["redis"] || !read["KEYS"] {
			t.Errorf("%s: globals not seen: %v", name, read)
		}
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

// What the header of grant.lua says of ARGV is what Go sends.
func TestHeaderOfGrant(t *testing.T) {
	p := Policy{Name: "p"}
	for i, name := range []Algorithm{Sliding, Fixed, GCRA} {
		w := testWindow(name)
		w.Name, w.Per = fmt.Sprint("w", i), []string{"tenant", "user", "ip"}[:i+1]
		p.Windows = append(p.Windows, w)
	}
	pl, err := newPlan(p)
	if err != nil {
		t.Fatal(err)
	}
	c, err := pl.newCall(Request{Policy: "p", Tenant: "acme", Nonce: "n", Attributes: map[string]string{"user": "bob", "ip": "1"}}, Tenant{})
	if err != nil {
		t.Fatal(err)
	}
	head := header(grantLua)
	own := regexp.MustCompile(`(?m)^--(?: ARGV |      ) (\d+) (\w+): `).FindAllStringSubmatch(head, -1)
	each := regexp.MustCompile(`five values: (head) \([^)]*\), (cost), (p1), (p2), (p3) `).FindStringSubmatch(strings.ReplaceAll(head, "\n--         ", " "))
	if len(own) != 4 || len(each) != 6 {
		t.Fatalf("the header lists %d arguments and for each window %q", len(own), each)
	}
	if got := len(c.grantArguments(0, false)); got != len(own)+len(pl.scopes)+(len(each)-1)*len(pl.Windows) {
		t.Errorf("Go sends %d values", got)
	}
	for _, index := range regexp.MustCompile(`ARGV\[i \+ (\d+)\]`).FindAllStringSubmatch(code(grantLua), -1) {
		if n, _ := strconv.Atoi(index[1]); n > len(each)-1 {
			t.Errorf("grant.lua reads beyond a window's values: %s", index[0])
		}
	}
	if exact := `local EXACT = (\d+)`; number(t, grantLua, exact) != number(t, slidingLua, exact) {
		t.Error("grant.lua and sliding.lua merge from different numbers on")
	}
}
