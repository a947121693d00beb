package policyfile

import (
	"strings"

	"github.com/agnivade/levenshtein"
)

// Suggest returns the known name that is most like a misspelt one, by the number of edits. It returns "" if every known
// name would take as many edits as half of its characters, or more. Case does not matter.
func Suggest(name string, known []string) string {
	nearest, least := "", len(name)
	for _, k := range known {
		if d := levenshtein.ComputeDistance(strings.ToLower(name), strings.ToLower(k)); d < least && 2*d < len(k) {
			nearest, least = k, d
		}
	}
	return nearest
}
