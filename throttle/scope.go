package throttle

import (
	"slices"
	"strings"

	"github.com/sluice-go/sluice/throttle/internal/quote"
)

// TenantAttribute is the attribute of tenants. Lines are fair between its values, and windows count by it
// unless Window.Scope says otherwise.
const TenantAttribute = "tenant"

// A Scope names the attributes that a window is counted by: see Per. The zero value is the tenant alone:
// each tenant has a count of its own. Scopes are equal if they name the same attributes.
type Scope string // "", ScopeShared, or else the names in order, each behind a comma

// ScopeShared is the scope of a window with one count for all tenants.
const ScopeShared Scope = "shared"

// Per returns the scope of a window that has a count for each combination of values of the
// attributes, such as Per("tenant", "user"). Their order does not matter. Without attributes it
// returns ScopeShared. Policy.Validate says whether the names can be used: 1 to MaxAttributes
// different ones, each of 1 to 64 of the characters A-Z a-z 0-9 _ . -
func Per(attributes ...string) Scope {
	switch {
	case len(attributes) == 0:
		return ScopeShared
	case len(attributes) == 1 && attributes[0] == TenantAttribute:
		return ""
	}
	return Scope("," + strings.Join(slices.Sorted(slices.Values(attributes)), ","))
}

// Attributes returns the names in alphabetical order, none for ScopeShared.
func (s Scope) Attributes() []string {
	switch s {
	case "":
		return []string{TenantAttribute}
	case ScopeShared:
		return []string{}
	}
	return slices.Sorted(strings.SplitSeq(strings.TrimPrefix(string(s), ","), ","))
}

func (s Scope) has(attribute string) bool { return slices.Contains(s.Attributes(), attribute) }

// A ScopeValue identifies one count of a window: the attributes of its scope, in alphabetical
// order, with their values.
type ScopeValue struct {
	Attributes []string `json:"attributes"`
	Values     []string `json:"values"` // one for each attribute
}

// String returns for instance "tenant=acme,user=bob", or "shared" for the count of ScopeShared.
func (s ScopeValue) String() string {
	if len(s.Attributes) == 0 {
		return string(ScopeShared)
	}
	parts := make([]string, len(s.Attributes))
	for i, a := range s.Attributes {
		parts[i] = a + "=" + quote.Name(s.Values[i])
	}
	return strings.Join(parts, ",")
}
