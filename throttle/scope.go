package throttle

import "strings"

// A Scope is whom a window counts: attributes with their values, in alphabetical order.
type Scope struct {
	Attributes []string
	Values     []string
}

// String is such as "tenant=acme,user=bob", or "shared" for a count shared by all.
func (s Scope) String() string {
	if len(s.Attributes) == 0 {
		return "shared"
	}
	parts := make([]string, len(s.Attributes))
	for i, a := range s.Attributes {
		parts[i] = a + "=" + printable(s.Values[i])
	}
	return strings.Join(parts, ",")
}
