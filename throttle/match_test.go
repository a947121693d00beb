package throttle_test

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

// words are all strings over the letters with at most so many of them.
func words(letters string, most int) []string {
	all := []string{""}
	for from := 0; most > 0; most-- {
		to := len(all)
		for _, word := range all[from:to] {
			for _, letter := range letters {
				all = append(all, word+string(letter))
			}
		}
		from = to
	}
	return all
}

// Two globs of 3 bytes have a name in common of 6 at most, if any.
func TestGlobsByBruteForce(t *testing.T) {
	globs, names := words("ab*?", 3), words("ab", 6)
	matched := make([]map[string]bool, len(globs))
	for i, glob := range globs {
		matched[i] = map[string]bool{}
		pattern := strings.NewReplacer("*", ".*", "?", ".").Replace(glob)
		re := regexp.MustCompile("^" + pattern + "$")
		for _, name := range names {
			if re.MatchString(name) {
				matched[i][name] = true
			}
			if got := throttle.MatchGlob(glob, name); got != matched[i][name] {
				t.Errorf("MatchGlob(%q, %q) = %v", glob, name, got)
			}
		}
	}
	for i, a := range globs {
		for j, b := range globs {
			common := false
			for name := range matched[i] {
				common = common || matched[j][name]
			}
			if got := throttle.GlobsOverlap(a, b); got != common {
				t.Errorf("GlobsOverlap(%q, %q) = %v", a, b, got)
			}
		}
	}
}

func TestMatchGlob(t *testing.T) {
	for _, tc := range []struct {
		glob, name string
		want       bool
	}{
		{"http:*", "http:call", true},
		{"http:*", "http:", true},
		{"http:*", "https:call", false},
		{"*:call", "http:call", true},
		{"*", "", true},
		{"?", "", false},
		{"?", "é", false}, // two bytes
		{"??", "é", true},
		{"*é", "caf\xc3\xa9", true},
		{"[a-z]", "a", false}, // everything else stands for itself
		{"[a-z]", "[a-z]", true},
		{`\*`, `\anything`, true},
		{"a*b*c*d*e*f*g*h", strings.Repeat("abcdefg", 2000), false}, // no backtracking
	} {
		if got := throttle.MatchGlob(tc.glob, tc.name); got != tc.want {
			t.Errorf("MatchGlob(%q, %q) = %v", tc.glob, tc.name, got)
		}
	}
	if !throttle.GlobsOverlap("é*", "*é") || throttle.GlobsOverlap("é*", "e*") {
		t.Error("globs of more than ASCII")
	}
}

func TestPolicyForATaskType(t *testing.T) {
	window := []throttle.Window{{Name: "w", Limit: 1, Period: m}}
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer client.Close()
	l := newLimiter(t, client,
		throttle.Policy{Name: "http", Match: []string{"http:*", "rpc:?"}, Windows: window},
		throttle.Policy{Name: "mail", Match: []string{"mail:send"}, Windows: window},
		throttle.Policy{Name: "by-name-only", Windows: window},
	)
	for range 2 { // the second time remembered
		for taskType, want := range map[string]string{"http:call": "http", "rpc:x": "http", "rpc:xy": "", "mail:send": "mail", "mail:sent": "", "": "", "by-name-only": ""} {
			if p, ok := l.Match(taskType); p.Name != want || ok != (want != "") {
				t.Errorf("%q: policy %q, %v, want %q", taskType, p.Name, ok, want)
			}
		}
	}
	for i := range 20_000 { // more types than are remembered
		if p, _ := l.Match(fmt.Sprint("http:", i)); p.Name != "http" {
			t.Fatalf("type %d: policy %q", i, p.Name)
		}
	}
	if err := l.SetPolicies([]throttle.Policy{{Name: "all", Match: []string{"*"}, Windows: window}}); err != nil {
		t.Fatal(err)
	}
	if p, _ := l.Match("mail:sent"); p.Name != "all" {
		t.Errorf("after SetPolicies: policy %q", p.Name)
	}
	if _, ok := l.Lookup("http"); ok || len(l.Policies()) != 1 {
		t.Error("a policy that was replaced is still there")
	}

	var bad *throttle.PolicyError
	err := l.SetPolicies([]throttle.Policy{{Name: "a", Match: []string{"x", "http:*"}, Windows: window}, {Name: "b", Match: []string{"*:call"}, Windows: window}})
	want := `throttle: policy "b": match "*:call": must not match a task type that policy "a" matches too, by "http:*"`
	if !errors.As(err, &bad) || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
	if p, _ := l.Match("mail:sent"); p.Name != "all" {
		t.Error("policies that were refused hold")
	}
}
