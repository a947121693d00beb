package throttle

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
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
			if got := matchGlob(glob, name); got != matched[i][name] {
				t.Errorf("matchGlob(%q, %q) = %v", glob, name, got)
			}
		}
	}
	for i, a := range globs {
		for j, b := range globs {
			common := false
			for name := range matched[i] {
				common = common || matched[j][name]
			}
			if got := globsOverlap(a, b); got != common {
				t.Errorf("globsOverlap(%q, %q) = %v", a, b, got)
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
		if got := matchGlob(tc.glob, tc.name); got != tc.want {
			t.Errorf("matchGlob(%q, %q) = %v", tc.glob, tc.name, got)
		}
	}
	if !globsOverlap("é*", "*é") || globsOverlap("é*", "e*") {
		t.Error("globs of more than ASCII")
	}
}

// slowOverlaps compares every glob with every other.
func slowOverlaps(policies []Policy) (overlaps []GlobOverlap) {
	for second, p := range policies {
		for first, other := range policies[:second] {
			found := slices.ContainsFunc(overlaps, func(o GlobOverlap) bool { return o.Second == second })
			for i, a := range other.Match {
				for j, b := range p.Match {
					if !found && a != "" && b != "" && globsOverlap(a, b) {
						overlaps, found = append(overlaps, GlobOverlap{First: first, FirstGlob: i, Second: second, SecondGlob: j}), true
					}
				}
			}
		}
	}
	return overlaps
}

func TestGlobOverlapsAreThoseOfTheSlowCheck(t *testing.T) {
	random, some, none := rand.New(rand.NewPCG(1, 9)), 0, 0
	for range 3000 {
		letters := []string{"ab*", "abc*?", "ab", "abcdefgh*?"}[random.IntN(4)]
		policies := make([]Policy, 2+random.IntN(4))
		for i := range policies {
			policies[i].Name = fmt.Sprint("p", i)
			for range random.IntN(5) {
				glob := make([]byte, random.IntN(7))
				for k := range glob {
					glob[k] = letters[random.IntN(len(letters))]
				}
				policies[i].Match = append(policies[i].Match, string(glob))
			}
		}
		want := slowOverlaps(policies)
		got, err := GlobOverlaps(policies)
		if err != nil || !slices.Equal(got, want) {
			t.Fatalf("%+v: got %+v, %v, want %+v", policies, got, err, want)
		}
		if len(want) > 0 {
			some++
		} else {
			none++
		}
	}
	if some < 500 || none < 500 {
		t.Errorf("%d with overlaps, %d without", some, none)
	}
}

// Many policies and many globs are compared; those that nothing but a comparison byte by byte keeps
// apart are refused before that takes long.
func TestManyGlobs(t *testing.T) {
	of := func(policies, globs int, format string) []Policy {
		list := make([]Policy, policies)
		for i := range list {
			list[i].Name = fmt.Sprint("p", i)
			for j := range globs {
				list[i].Match = append(list[i].Match, fmt.Sprintf(format, i*globs+j))
			}
		}
		return list
	}
	for _, policies := range [][]Policy{
		of(2, 4000, "queue:%05d:*"), of(2500, 1, "%05d:*"), of(2500, 3, "type%06d"), of(2, 2500, "*:%06d"), of(200, 20, "a*%06d"),
	} {
		if overlaps, err := GlobOverlaps(policies); err != nil || len(overlaps) > 0 {
			t.Errorf("%q: %v, %v", policies[0].Match[0], overlaps, err)
		}
	}
	all := of(3000, 1, "*%d*")
	if overlaps, err := GlobOverlaps(all); err != nil || len(overlaps) != 2999 {
		t.Errorf("%d overlaps, %v", len(overlaps), err)
	}
	hostile := of(2, 4000, "*"+strings.Repeat("a?", 40)+"%06d"+strings.Repeat("?b", 40))
	_, err := GlobOverlaps(hostile)
	var wrong *PolicyError
	if !errors.As(err, &wrong) || err.Error() != `throttle: policy "p1": match 4000: are too many globs that begin and end as those of `+
		`other policies do: let them begin with different text` {
		t.Errorf("%v", err)
	}
}

func TestLongGlobs(t *testing.T) {
	p := Policy{
		Match: []string{strings.Repeat("a", MaxGlobBytes)}, Name: "p",
		Windows: []Window{{Limit: 1, Name: "w", Period: time.Second}},
	}
	if err := p.Validate(); err != nil {
		t.Error(err)
	}
	p.Match[0] += "*"
	if err := p.Validate(); err == nil || !strings.HasSuffix(err.Error(), ": must be at most 1024 bytes") {
		t.Error(err)
	}
}
