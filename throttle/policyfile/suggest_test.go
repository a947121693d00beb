package policyfile

import (
	"testing"

	"github.com/sluice-go/sluice/internal/testhook/expect"
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
		expect.Equal(t, Suggest(name, known), want, name)
	}
}
