package worker_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/worker"
)

// Any headers of a task give an identity that comes back as it is, or an error that asynq can
// store.
func FuzzHeaders(f *testing.F) {
	for _, seed := range [][3]string{
		{"acme", "user=bob&ip=10.0.0.1", "requests=1&tokens=1500"},
		{"", "", ""},
		{"%zz", "%zz=1", "requests=%zz"},
		{"%2541", "a=%2541", "%2541=1"},
		{"%FF%00", "a=%FF&a=2&=&;", "requests=1;tokens=2"},
		{"\xff", "\xff=\xfe", "\xff=1"},
		{"acme", "user", "requests"},
		{"acme", "", "requests=1.5"}, {"acme", "", "requests=NaN"}, {"acme", "", "requests=-1"}, {"acme", "", "requests=+1"},
		{"acme", "", "requests=9223372036854775808"}, {"acme", "", "requests=1e9"}, {"acme", "", "tokens=1&tokens=2"},
		{strings.Repeat("x", 2000), strings.Repeat("a=b&", 2000), strings.Repeat("&", 2000)},
	} {
		f.Add(seed[0], seed[1], seed[2])
	}
	f.Fuzz(func(t *testing.T, tenant, attributes, cost string) {
		headers := map[string]string{"sluice-tenant": tenant, "sluice-attributes": attributes, "sluice-cost": cost}
		id, err := worker.IdentityOf(asynq.NewTaskWithHeaders("x", nil, headers))
		if err != nil {
			if !utf8.ValidString(err.Error()) || strings.ContainsAny(err.Error(), "\n\x00") || id.Tenant != "" {
				t.Errorf("%q: %+v, %q", headers, id, err)
			}
			return
		}
		again, err := worker.IdentityOf(worker.NewTask(id, "x", nil))
		if err != nil || !sameIdentity(id, again) {
			t.Errorf("%q: %#v comes back as %#v, %v", headers, id, again, err)
		}
	})
}

func sameIdentity(a, b worker.Identity) bool {
	if a.Tenant != b.Tenant || len(a.Attributes) != len(b.Attributes) || len(a.Cost) != len(b.Cost) {
		return false
	}
	for name, value := range a.Attributes {
		if other, ok := b.Attributes[name]; !ok || other != value {
			return false
		}
	}
	for unit, n := range a.Cost {
		if other, ok := b.Cost[unit]; !ok || other != n {
			return false
		}
	}
	return true
}
