package policyfile

import (
	"testing"

	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

func TestAMisspelledNameHasASuggestion(t *testing.T) {
	t.Parallel()
	known := []string{"tenant", "url", "type", "period", "per"}
	for name, want := range map[string]string{
		"tenat":  "tenant",
		"Tennat": "tenant",
		"URL":    "url",
		"perid":  "period",
		"pre":    "",
		"colour": "",
		"":       "",
	} {
		limitertest.Equal(t, Suggest(name, known), want, name)
	}
}
