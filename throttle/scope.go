package throttle

import (
	"strings"

	"github.com/sluice-go/sluice/throttle/internal/quote"
)

// TenantAttribute is the attribute of tenants. Lines are fair between its values, and windows count by it
// unless Window.Per or Window.Shared says otherwise.
const TenantAttribute = "tenant"

// A ScopeValue identifies one count of a window: the attributes of its scope, in alphabetical
// order, with their values.
type ScopeValue struct {
	Attributes []string `json:"attributes"`
	Values     []string `json:"values"` // one for each attribute
}

// String returns for instance "tenant=acme,user=bob", or "shared" for the count of a shared window.
func (s ScopeValue) String() string {
	if len(s.Attributes) == 0 {
		return "shared"
	}
	parts := make([]string, len(s.Attributes))
	for i, a := range s.Attributes {
		parts[i] = a + "=" + quote.Name(s.Values[i])
	}
	return strings.Join(parts, ",")
}
