package promthrottle

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// Tenants have labels while there are some left. Later those with far more events get them.
func TestTheMostActiveTenantsHaveLabels(t *testing.T) {
	ts := tenants{most: 2}
	var forgotten []string
	forget := func(label string) { forgotten = append(forgotten, label) }
	now := time.Now()
	count := func(tenant, want string, times int) {
		t.Helper()
		for range times {
			if got := ts.label(tenant, now, forget); got != want {
				t.Fatalf("%s is counted as %q, want %q", tenant, got, want)
			}
		}
	}
	count("a", "a", 5)
	count("b", "b", 10)
	count("c", others, 20)
	count("d", others, 11)
	now = now.Add(reviewEvery)
	count("a", others, 1) // its label is c's: 20 events are more than twice its 5
	count("b", "b", 1)    // d has 11, and not more than twice the 10
	count("c", "c", 1)
	if !slices.Equal(forgotten, []string{"a"}) {
		t.Errorf("forgotten: %q", forgotten)
	}
	for i := range 2 * maxSeen {
		count(fmt.Sprintf("one of many %d", i), others, 1)
	}
	if len(ts.seen) > maxSeen+2 || len(ts.labelled) != 2 {
		t.Errorf("%d are remembered, %d labelled", len(ts.seen), len(ts.labelled))
	}
	now = now.Add(2 * reviewEvery) // b and c were idle, and so is everybody else but once
	count("b", "b", 1)
}

// A tenant's name is data.
func TestLabelsOfHostileNames(t *testing.T) {
	for name, want := range map[string]string{
		"acme": "acme", "other": `"other"`, "": "", "a\nb": `"a\nb"`, `a"b`: `"a\"b"`, "\xff\xfe": "\uFFFD",
		strings.Repeat("x", 70): strings.Repeat("x", 64) + "...",
	} {
		if got := labelOf(name); got != want || !utf8.ValidString(got) {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
	}
}
