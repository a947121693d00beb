// Package glob matches names by globs, and finds globs that match the same name. In a glob * stands
// for any number of bytes, ? for one, and everything else for itself.
package glob

import "slices"

// Match reports whether the glob matches the whole name.
func Match(glob, name string) bool { return meet(glob, name, false) }

// Overlap reports whether both globs match some name.
func Overlap(a, b string) bool { return meet(a, b, true) }

// meet reports whether some name matches both strings. If `both` is false, b is a name, whose wildcards stand for
// themselves. Most strings differ before their first wildcard or after their last one, which is cheap to check.
func meet(a, b string, both bool) bool {
	plain := func(c, d byte) bool { return c != '*' && c != '?' && !(both && (d == '*' || d == '?')) }
	for a != "" && b != "" && plain(a[0], b[0]) {
		if a[0] != b[0] {
			return false
		}
		a, b = a[1:], b[1:]
	}
	for i, j := len(a), len(b); i > 0 && j > 0 && plain(a[i-1], b[j-1]); i, j = i-1, j-1 {
		if a[i-1] != b[j-1] {
			return false
		}
	}
	return walk(a, b, both)
}

// walk walks both strings together: reach[j] tells whether some name matches a[:i] and b[:j].
func walk(a, b string, both bool) bool {
	star := func(s string, i int, glob bool) bool { return glob && s[i] == '*' }
	reach := make([]bool, len(b)+1)
	reach[0] = true
	for j := range b {
		reach[j+1] = reach[j] && star(b, j, both)
	}
	for i := range len(a) {
		next := make([]bool, len(b)+1)
		next[0] = reach[0] && star(a, i, true)
		for j := range len(b) {
			switch {
			case star(a, i, true), star(b, j, both):
				next[j+1] = reach[j+1] || next[j]
			default:
				next[j+1] = reach[j] && (a[i] == b[j] || a[i] == '?' || both && b[j] == '?')
			}
		}
		if reach = next; !slices.Contains(reach, true) {
			return false
		}
	}
	return reach[len(b)]
}
