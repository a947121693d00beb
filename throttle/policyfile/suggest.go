package policyfile

import (
	"strings"

	"github.com/agnivade/levenshtein"
)

// Suggest returns what a misspelt name was probably meant to be: the known name that takes the
// fewest edits to reach from name. It returns "" if none is near: fewer than half of a known name's
// characters may be edited. Upper case in name is ignored.
func Suggest(name string, known []string) string {
	nearest, least := "", len(name)
	for _, k := range known {
		if d := levenshtein.ComputeDistance(strings.ToLower(name), k); d < least && 2*d < len(k) {
			nearest, least = k, d
		}
	}
	return nearest
}
