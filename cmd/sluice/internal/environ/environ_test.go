package environ

import "testing"

func TestVariablesAreExpandedOnce(t *testing.T) {
	t.Parallel()
	lookup := func(name string) (string, bool) {
		value, found := map[string]string{"A": "one", "B_2": "${A}", "EMPTY": ""}[name]
		return value, found
	}
	for text, want := range map[string]string{
		"":                   "",
		"plain $5 {A} $A":    "plain $5 {A} $A",
		"${A}, ${A} $${A}":   "one, one ${A}",
		"${B_2}":             "${A}", // a value is not expanded again
		"x${EMPTY}y":         "xy",
		"cost $$$${A} ${A}$": "cost $$${A} one$",
	} {
		if got, err := Expand(text, lookup, nil); err != nil || got != want {
			t.Errorf("%q: %q, %v, want %q", text, got, err, want)
		}
	}
	for text, want := range map[string]string{
		"${C}":       "${C}: the environment has no such variable: it must be set",
		"${A} ${D}":  "${D}: the environment has no such variable: it must be set",
		"${}":        "${}: must be the name of a variable such as ${TOKEN}; $${ stands for the text ${",
		"${A B}":     "${A B}: must be the name of a variable such as ${TOKEN}; $${ stands for the text ${",
		"open ${A":   "${A: must be the name of a variable such as ${TOKEN}; $${ stands for the text ${",
		"${A:-none}": "${A:-none}: must be the name of a variable such as ${TOKEN}; $${ stands for the text ${",
	} {
		if _, err := Expand(text, lookup, nil); err == nil || err.Error() != want {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}
