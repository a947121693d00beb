package glob

import (
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-go/sluice/internal/testhook/expect"
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
		re := regexp.MustCompile("^" + strings.NewReplacer("*", ".*", "?", ".").Replace(glob) + "$")
		for _, name := range names {
			if re.MatchString(name) {
				matched[i][name] = true
			}
			expect.Equal(t, Match(glob, name), matched[i][name], "Match", glob, name, "=")
		}
	}
	for i, a := range globs {
		for j, b := range globs {
			common := slices.ContainsFunc(names, func(name string) bool { return matched[i][name] && matched[j][name] })
			expect.Equal(t, Overlap(a, b), common, "Overlap", a, b, "=")
		}
	}
}

// Names of other bytes, and long ones. TestGlobsByBruteForce has all short ones.
func TestGlobsMatchNames(t *testing.T) {
	for _, tc := range []struct {
		glob, name string
		want       bool
	}{
		{"?", "é", false}, // two bytes
		{"??", "é", true},
		{"*é", "caf\xc3\xa9", true},
		{"[a-z]", "a", false}, // everything else stands for itself
		{"[a-z]", "[a-z]", true},
		{`\*`, `\anything`, true},
		{"a*b*c*d*e*f*g*h", strings.Repeat("abcdefg", 2000), false}, // no backtracking
	} {
		expect.Equal(t, Match(tc.glob, tc.name), tc.want, "Match", tc.glob, tc.name, "=")
	}
	expect.That(t, Overlap("é*", "*é") && !Overlap("é*", "e*"), "globs of more than ASCII")
}

// slowOverlaps compares every glob with every other.
func slowOverlaps(lists [][]string) (pairs []Pair) {
	for second, globs := range lists {
		for first, others := range lists[:second] {
			found := slices.ContainsFunc(pairs, func(p Pair) bool { return p.Second == second })
			for i, a := range others {
				for j, b := range globs {
					if !found && a != "" && b != "" && Overlap(a, b) {
						pairs, found = append(pairs, Pair{First: first, FirstGlob: i, Second: second, SecondGlob: j}), true
					}
				}
			}
		}
	}
	return pairs
}

func TestOverlapsAreThoseOfTheSlowCheck(t *testing.T) {
	random, some, none := rand.New(rand.NewPCG(1, 9)), 0, 0
	for range 3000 {
		letters := []string{"ab*", "abc*?", "ab", "abcdefgh*?"}[random.IntN(4)]
		lists := make([][]string, 2+random.IntN(4))
		for i := range lists {
			for range random.IntN(5) {
				glob := make([]byte, random.IntN(7))
				for k := range glob {
					glob[k] = letters[random.IntN(len(letters))]
				}
				lists[i] = append(lists[i], string(glob))
			}
		}
		want := slowOverlaps(lists)
		got := Overlaps(lists)
		expect.Require(t, slices.Equal(got, want), lists, "got", got, "want", want)
		if len(want) > 0 {
			some++
		} else {
			none++
		}
	}
	expect.That(t, some >= 500 && none >= 500, some, "with overlaps", none, "without")
}

// Globs whose ends differ are not compared byte by byte.
func TestManyGlobsAreComparedFast(t *testing.T) {
	globLists := func(lists, globs int, format string) [][]string {
		all := make([][]string, lists)
		for i := range all {
			for j := range globs {
				all[i] = append(all[i], fmt.Sprintf(format, i*globs+j))
			}
		}
		return all
	}
	for _, lists := range [][][]string{
		globLists(2, 2000, "queue:%05d:*"), globLists(2500, 1, "%05d:*"), globLists(1000, 3, "type%06d"), globLists(2, 1500, "*:%06d"), globLists(100, 20, "a*%06d"),
	} {
		expect.Equal(t, Overlaps(lists), nil, lists[0][0])
	}
	expect.Equal(t, len(Overlaps(globLists(3000, 1, "*%d*"))), 2999, "pairs")
}
