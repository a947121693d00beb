package throttle

import (
	"maps"
	"slices"
	"strings"
)

// Bounds of the globs of all policies together.
const (
	MaxGlobBytes = 1024

	// maxGlobWork bounds the comparison of globs: 4 for each pair that can meet by their
	// beginnings, and one for each pair of bytes if they can by their ends too. That takes a second
	// or two.
	maxGlobWork = 1 << 28
)

// A GlobOverlap says that two policies match one task type: by their places in the list, and those
// of the globs in their Match.
type GlobOverlap struct {
	First, FirstGlob   int
	Second, SecondGlob int
}

// GlobOverlaps returns, for each policy that matches a task type which one before it matches too,
// the first such policy and the first two of their globs. Empty globs match nothing here. The
// error, a *PolicyError, says that there are too many globs alike to compare.
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

// A globIndex finds the globs that a glob can meet: those whose stem begins with its own, or the
// other way around. A stem is what stands before the first wildcard.
type globIndex struct {
	byStem  map[string][]int // by stem: places in globs, ascending
	globs   []indexedGlob    // in the order of policies
	lengths []int            // of stems, ascending
	stems   []string         // sorted
	work    int
}

type indexedGlob struct {
	text, stem, tail string // tail stands behind the last wildcard
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

// first finds what the globs of one policy, at from to to, overlap first. It is not ok if that is
// too much work.
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
				if x.work += len(g.text) * len(other.text); GlobsOverlap(g.text, other.text) {
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

// apart reports whether the ends of two globs, or a literal, already say that they have no name in
// common.
func (g indexedGlob) apart(other indexedGlob) bool {
	if g.literal && other.literal {
		return g.text != other.text
	}
	return !strings.HasSuffix(g.tail, other.tail) && !strings.HasSuffix(other.tail, g.tail)
}
