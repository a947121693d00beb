package throttle

import (
	"maps"
	"slices"
	"strings"
)

// MaxGlobBytes bounds a glob in Policy.Match.
const MaxGlobBytes = 1024

// maxGlobWork bounds the comparison of all globs, to a second or two. A pair whose beginnings can
// meet counts 4. If its ends can meet too, each pair of their bytes counts 1.
const maxGlobWork = 1 << 28

// A GlobOverlap is a pair of policies that match the same task type.
type GlobOverlap struct {
	First, FirstGlob   int // index of the policy, and of its glob in Match
	Second, SecondGlob int // the same of the later policy
}

// GlobOverlaps finds the policies that match a task type which an earlier policy matches too. For
// each it returns the first such policy and their first two globs that overlap. SetPolicies refuses
// such policies; GlobOverlaps is for programs that report all of them. Empty globs match nothing.
// The error is a *PolicyError: too many globs are alike to compare.
func GlobOverlaps(policies []Policy) ([]GlobOverlap, error) {
	index := globIndex{byStem: map[string][]int{}}
	for p, policy := range policies {
		for g, text := range policy.Match {
			if text != "" {
				index.add(text, p, g)
			}
		}
	}
	index.sort()
	var overlaps []GlobOverlap
	for from := 0; from < len(index.globs); {
		to := from + 1
		for to < len(index.globs) && index.globs[to].policy == index.globs[from].policy {
			to++
		}
		if o, found, ok := index.first(from, to); !ok {
			g := index.globs[from]
			return overlaps, &PolicyError{Policy: policies[g.policy].Name, Field: "match", Value: to - from,
				Hint: "are too many globs that begin and end as those of other policies do: let them begin with different text"}
		} else if found {
			overlaps = append(overlaps, o)
		}
		from = to
	}
	return overlaps, nil
}

// A globIndex finds the globs that a glob can meet: one of the two stems begins with the other. A
// stem is the text before the first wildcard.
type globIndex struct {
	byStem  map[string][]int // by stem: places in globs, ascending
	globs   []indexedGlob    // in the order of policies
	lengths []int            // of stems, ascending
	stems   []string         // sorted
	work    int
}

type indexedGlob struct {
	text, stem, tail string // tail is the text after the last wildcard
	literal          bool   // it has no wildcard
	policy, glob     int
}

func (x *globIndex) add(text string, policy, glob int) {
	g := indexedGlob{text: text, stem: text, tail: text, literal: true, policy: policy, glob: glob}
	if i := strings.IndexAny(text, "*?"); i >= 0 {
		g.stem, g.tail, g.literal = text[:i], text[strings.LastIndexAny(text, "*?")+1:], false
	}
	x.byStem[g.stem] = append(x.byStem[g.stem], len(x.globs))
	x.globs = append(x.globs, g)
}

func (x *globIndex) sort() {
	x.stems = slices.Sorted(maps.Keys(x.byStem))
	for _, stem := range x.stems {
		x.lengths = append(x.lengths, len(stem))
	}
	slices.Sort(x.lengths)
	x.lengths = slices.Compact(x.lengths)
}

// first finds the first glob that a glob of one policy overlaps. The policy's globs are those from
// place from up to place to. It is not ok if that is too much work.
func (x *globIndex) first(from, to int) (o GlobOverlap, found, ok bool) {
	best, by := from, 0 // the least place of a glob that one of these overlaps
	meet := func(g indexedGlob, i int, places []int) bool {
		for _, place := range places {
			if place >= best {
				break // those behind it are not before it either
			}
			if x.work += 4; x.work > maxGlobWork {
				return false
			}
			if other := x.globs[place]; !g.apart(other) {
				if x.work += len(g.text) * len(other.text); globsOverlap(g.text, other.text) {
					best, by, found = place, i, true
				}
			}
		}
		return true
	}
	for i := from; i < to; i++ {
		g := x.globs[i]
		for _, n := range x.lengths {
			if n >= len(g.stem) {
				break
			}
			if x.work++; !meet(g, i, x.byStem[g.stem[:n]]) {
				return o, false, false
			}
		}
		start, _ := slices.BinarySearch(x.stems, g.stem)
		for _, stem := range x.stems[start:] {
			if !strings.HasPrefix(stem, g.stem) || g.literal && len(stem) > len(g.stem) {
				break
			}
			if x.work++; !meet(g, i, x.byStem[stem]) {
				return o, false, false
			}
		}
	}
	first, second := x.globs[best], x.globs[by]
	return GlobOverlap{first.policy, first.glob, second.policy, second.glob}, found, true
}

// apart reports whether the ends of two globs show that they have no name in common. It is cheap.
func (g indexedGlob) apart(other indexedGlob) bool {
	if g.literal && other.literal {
		return g.text != other.text
	}
	return !strings.HasSuffix(g.tail, other.tail) && !strings.HasSuffix(other.tail, g.tail)
}
