package limitertest

import (
	"slices"
	"testing"

	"github.com/sluice-go/sluice/throttle"
)

func TestScopesAreEqualIfTheyNameTheSame(t *testing.T) {
	for _, row := range []struct {
		scope, same throttle.Scope
		names       []string
		text        string
	}{
		{throttle.Scope{}, throttle.Per("tenant"), []string{"tenant"}, "tenant"},
		{throttle.ScopeShared, throttle.Per(), nil, "shared"},
		{throttle.Per("user", "tenant"), throttle.Per("tenant", "user"), []string{"tenant", "user"}, "tenant,user"},
		{throttle.Per("shared"), throttle.Per("shared"), []string{"shared"}, "shared"},
		{throttle.Per(`a","b`), throttle.Per(`a","b`), []string{`a","b`}, `a","b`}, // which Validate refuses, as one name
	} {
		if row.scope != row.same || !slices.Equal(row.scope.Attributes(), row.names) || row.scope.String() != row.text {
			t.Errorf("%q and %q, %q, %q, want %q", row.scope, row.same, row.scope, row.scope.Attributes(), row.names)
		}
	}
	That(t, throttle.Per("shared") != throttle.ScopeShared &&
		throttle.Per(`a","b`) != throttle.Per("a", "b") && throttle.Per("user") != (throttle.Scope{}),
		"different scopes are equal")
	throttle.Per("b", "a").Attributes()[0] = "c"
	Equal(t, throttle.Per("b", "a").Attributes()[0], "a")
}
