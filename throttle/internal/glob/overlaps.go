package glob

// A Pair is two globs of different lists that overlap.
type Pair struct {
	First, FirstGlob   int // index of the list, and of its glob
	Second, SecondGlob int // the same for the later list
}

// Overlaps finds the lists with a glob that overlaps one of an earlier list. For each it returns the
// first such list and their first two globs that overlap. Empty globs match nothing.
func Overlaps(lists [][]string) (pairs []Pair) {
	for i, globs := range lists {
		if pair, found := first(lists[:i], globs); found {
			pair.Second = i
			pairs = append(pairs, pair)
		}
	}
	return pairs
}

// first finds the first glob in the lists that overlaps one of globs.
func first(lists [][]string, globs []string) (p Pair, found bool) {
	for p.First = range lists {
		for p.FirstGlob = range lists[p.First] {
			for p.SecondGlob = range globs {
				a, b := lists[p.First][p.FirstGlob], globs[p.SecondGlob]
				if a != "" && b != "" && Overlap(a, b) {
					return p, true
				}
			}
		}
	}
	return p, false
}
