package glob

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// maxWork bounds the comparison of all globs, to a second or two. A pair whose beginnings can meet
// counts 4. If its ends can meet too, each pair of their bytes counts 1.
const maxWork = 1 << 28

// A Pair is two globs that overlap, of different lists.
type Pair struct {
	First, FirstGlob   int // index of the list, and of its glob
	Second, SecondGlob int // the same of the later list
}

// A TooAlikeError says that too many globs are alike to compare.
type TooAlikeError struct {
	List  int // the index of the list that could not be compared with those before it
	Globs int // how many the list has
}

func (e *TooAlikeError) Error() string {
	return fmt.Sprintf("glob: list %d: %d globs are too many that begin and end as others do", e.List, e.Globs)
}

// Overlaps finds the lists with a glob that overlaps one of an earlier list. For each it returns the
// first such list and their first two globs that overlap. Empty globs match nothing. The error is a
// *TooAlikeError.
func Overlaps(lists [][]string) ([]Pair, error) {
	x := index{byStem: map[string][]int{}}
	for list, globs := range lists {
		for i, text := range globs {
			if text != "" {
				x.add(text, list, i)
			}
		}
	}
	x.sort()
	var pairs []Pair
	for from := 0; from < len(x.globs); {
		to := from + 1
		for to < len(x.globs) && x.globs[to].list == x.globs[from].list {
			to++
		}
		if pair, found, ok := x.first(from, to); !ok {
			return pairs, &TooAlikeError{List: x.globs[from].list, Globs: to - from}
		} else if found {
			pairs = append(pairs, pair)
		}
		from = to
	}
	return pairs, nil
}

// An index finds the globs that a glob can meet: one of the two stems begins with the other. A
// stem is the text before the first wildcard.
type index struct {
	byStem  map[string][]int // by stem: places in globs, ascending
	globs   []indexed        // in the order of lists
	lengths []int            // of stems, ascending
	stems   []string         // sorted
	work    int
}

type indexed struct {
	text, stem, tail string // tail is the text after the last wildcard
	literal          bool   // it has no wildcard
	list, glob       int
}

func (x *index) add(text string, list, glob int) {
	g := indexed{text: text, stem: text, tail: text, literal: true, list: list, glob: glob}
	if i := strings.IndexAny(text, "*?"); i >= 0 {
		g.stem, g.tail, g.literal = text[:i], text[strings.LastIndexAny(text, "*?")+1:], false
	}
	x.byStem[g.stem] = append(x.byStem[g.stem], len(x.globs))
	x.globs = append(x.globs, g)
}

func (x *index) sort() {
	x.stems = slices.Sorted(maps.Keys(x.byStem))
	for _, stem := range x.stems {
		x.lengths = append(x.lengths, len(stem))
	}
	slices.Sort(x.lengths)
	x.lengths = slices.Compact(x.lengths)
}

// first finds the first glob that a glob of one list overlaps. The list's globs are those from place
// from up to place to. It is not ok if that is too much work.
func (x *index) first(from, to int) (o Pair, found, ok bool) {
	best, by := from, 0 // the least place of a glob that one of these overlaps
	meet := func(g indexed, i int, places []int) bool {
		for _, place := range places {
			if place >= best {
				break // those behind it are not before it either
			}
			if x.work += 4; x.work > maxWork {
				return false
			}
			if other := x.globs[place]; !g.apart(other) {
				if x.work += len(g.text) * len(other.text); Overlap(g.text, other.text) {
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
	return Pair{first.list, first.glob, second.list, second.glob}, found, true
}

// apart reports whether the ends of two globs show that they have no name in common. It is cheap.
func (g indexed) apart(other indexed) bool {
	if g.literal && other.literal {
		return g.text != other.text
	}
	return !strings.HasSuffix(g.tail, other.tail) && !strings.HasSuffix(other.tail, g.tail)
}
