package glob

import "strings"

// A Pair is two globs that overlap, of different lists.
type Pair struct {
	First, FirstGlob   int // index of the list, and of its glob
	Second, SecondGlob int // the same of the later list
}

// Overlaps finds the lists with a glob that overlaps one of an earlier list. For each it returns the
// first such list and their first two globs that overlap. Empty globs match nothing.
func Overlaps(lists [][]string) (pairs []Pair) {
	split := make([][]splitGlob, len(lists))
	for i, globs := range lists {
		for _, glob := range globs {
			split[i] = append(split[i], splitAt(glob))
		}
		if pair, found := first(split[:i], split[i]); found {
			pair.Second = i
			pairs = append(pairs, pair)
		}
	}
	return pairs
}

// first finds the first glob of some lists that overlaps one of these.
func first(lists [][]splitGlob, globs []splitGlob) (p Pair, found bool) {
	for p.First = range lists {
		for p.FirstGlob = range lists[p.First] {
			for p.SecondGlob = range globs {
				a, b := lists[p.First][p.FirstGlob], globs[p.SecondGlob]
				if !a.apart(b) && Overlap(a.text, b.text) {
					return p, true
				}
			}
		}
	}
	return p, false
}

// A splitGlob is a glob, with its text before the first wildcard and behind the last one.
type splitGlob struct{ text, stem, tail string }

func splitAt(text string) splitGlob {
	i := strings.IndexAny(text, "*?")
	if i < 0 {
		return splitGlob{text, text, text}
	}
	return splitGlob{text, text[:i], text[strings.LastIndexAny(text, "*?")+1:]}
}

// apart reports whether the ends of two globs show that they have no name in common. It is cheap.
func (g splitGlob) apart(other splitGlob) bool {
	return g.text == "" || other.text == "" ||
		!strings.HasPrefix(g.stem, other.stem) && !strings.HasPrefix(other.stem, g.stem) ||
		!strings.HasSuffix(g.tail, other.tail) && !strings.HasSuffix(other.tail, g.tail)
}
