package policyfile

import (
	"strings"

	"github.com/agnivade/levenshtein"
)

// Suggest returns the known name that is most like a misspelt one, by the number of edits. It
// returns "" if each would take edits to half of its characters or more. Upper case in name is
// ignored.
func Suggest(name string, known []string) string {
	nearest, least := "", len(name)
	for _, k := range known {
		if d := levenshtein.ComputeDistance(strings.ToLower(name), k); d < least && 2*d < len(k) {
			nearest, least = k, d
		}
	}
	return nearest
}
