package throttle

import (
	"errors"

	"github.com/sluice-go/sluice/throttle/internal/glob"
)

// MaxGlobBytes bounds a glob in Policy.Match.
const MaxGlobBytes = 1024

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
	lists := make([][]string, len(policies))
	for i, p := range policies {
		lists[i] = p.Match
	}
	pairs, err := glob.Overlaps(lists)
	var overlaps []GlobOverlap
	for _, pair := range pairs {
		overlaps = append(overlaps, GlobOverlap(pair))
	}
	var alike *glob.TooAlikeError
	if errors.As(err, &alike) {
		return overlaps, &PolicyError{Policy: policies[alike.List].Name, Field: "match", Value: alike.Globs,
			Hint: "are too many globs that begin and end as those of other policies do: let them begin with different text"}
	}
	return overlaps, err
}
