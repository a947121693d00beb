package throttle_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-go/sluice/throttle"
)

// slowOverlaps compares every glob with every other.
func slowOverlaps(policies []throttle.Policy) (overlaps []throttle.GlobOverlap) {
	for second, p := range policies {
		for first, other := range policies[:second] {
			found := slices.ContainsFunc(overlaps, func(o throttle.GlobOverlap) bool { return o.Second == second })
			for i, a := range other.Match {
				for j, b := range p.Match {
					if !found && a != "" && b != "" && throttle.GlobsOverlap(a, b) {
						overlaps, found = append(overlaps, throttle.GlobOverlap{First: first, FirstGlob: i, Second: second, SecondGlob: j}), true
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
		policies := make([]throttle.Policy, 2+random.IntN(4))
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
		got, err := throttle.GlobOverlaps(policies)
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
	of := func(policies, globs int, format string) []throttle.Policy {
		list := make([]throttle.Policy, policies)
		for i := range list {
			list[i].Name = fmt.Sprint("p", i)
			for j := range globs {
				list[i].Match = append(list[i].Match, fmt.Sprintf(format, i*globs+j))
			}
		}
		return list
	}
	for _, policies := range [][]throttle.Policy{
		of(2, 8000, "queue:%05d:*"), of(5000, 1, "%05d:*"), of(5000, 3, "type%06d"), of(2, 5000, "*:%06d"), of(200, 20, "a*%06d"),
	} {
		if overlaps, err := throttle.GlobOverlaps(policies); err != nil || len(overlaps) > 0 {
			t.Errorf("%q: %v, %v", policies[0].Match[0], overlaps, err)
		}
	}
	all := of(3000, 1, "*%d*")
	if overlaps, err := throttle.GlobOverlaps(all); err != nil || len(overlaps) != 2999 {
		t.Errorf("%d overlaps, %v", len(overlaps), err)
	}
	hostile := of(2, 4000, "*"+strings.Repeat("a?", 40)+"%06d"+strings.Repeat("?b", 40))
	_, err := throttle.GlobOverlaps(hostile)
	var wrong *throttle.PolicyError
	if !errors.As(err, &wrong) || err.Error() != `throttle: policy "p1": match 4000: are too many globs that begin and end as those of `+
		`other policies do: let them begin with different text` {
		t.Errorf("%v", err)
	}
}

func TestLongGlobs(t *testing.T) {
	p := policy(sharedWindow(1, s))
	p.Match = []string{strings.Repeat("a", throttle.MaxGlobBytes)}
	if err := p.Validate(); err != nil {
		t.Error(err)
	}
	p.Match[0] += "*"
	if err := p.Validate(); err == nil || !strings.HasSuffix(err.Error(), ": must be at most 1024 bytes") {
		t.Error(err)
	}
}
