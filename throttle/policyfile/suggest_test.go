package policyfile

import "testing"

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
		if got := Suggest(name, known); got != want {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
	}
}
