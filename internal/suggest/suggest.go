// Package suggest finds what a misspelt name was probably meant to be.
package suggest

import (
	"strings"

	"github.com/agnivade/levenshtein"
)

// Nearest returns the known name that takes the fewest edits to reach from name, or "" if none is
// near: a name is near if fewer than half of its characters have to be edited. Upper case in name
// is ignored.
func Nearest(name string, known []string) string {
	nearest, least := "", len(name)
	for _, k := range known {
		if d := levenshtein.ComputeDistance(strings.ToLower(name), k); d < least && 2*d < len(k) {
			nearest, least = k, d
		}
	}
	return nearest
}
