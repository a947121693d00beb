package limitertest

import (
	"errors"
	"fmt"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

func TestPolicyForATaskType(t *testing.T) {
	window := []throttle.Window{{Name: "w", Limit: 1, Period: m}}
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer client.Close()
	l := New(t, client,
		throttle.Policy{Name: "http", Match: []string{"http:*", "rpc:?"}, Windows: window},
		throttle.Policy{Name: "mail", Match: []string{"mail:send"}, Windows: window},
		throttle.Policy{Name: "by-name-only", Windows: window},
	)
	for range 2 { // the second time remembered
		for taskType, want := range map[string]string{"http:call": "http", "rpc:x": "http", "rpc:xy": "", "mail:send": "mail", "mail:sent": "", "": "", "by-name-only": ""} {
			if p, ok := l.Match(taskType, false); p.Name != want || ok != (want != "") {
				t.Errorf("%q: policy %q, %v, want %q", taskType, p.Name, ok, want)
			}
		}
	}
	for i := range 20_000 { // more types than are remembered
		if p, _ := l.Match(fmt.Sprint("http:", i), false); p.Name != "http" {
			t.Fatalf("type %d: policy %q", i, p.Name)
		}
	}
	Must(t, l.SetPolicies([]throttle.Policy{{Name: "all", Match: []string{"*"}, Windows: window}}))
	if p, _ := l.Match("mail:sent", false); p.Name != "all" {
		t.Errorf("after SetPolicies: policy %q", p.Name)
	}
	if p, ok := l.Lookup("http"); !ok || p.Name != "http" || len(l.Policies()) != 1 {
		t.Errorf("a policy that was replaced: %+v, %v", p, ok)
	}

	var bad *throttle.PolicyError
	err := l.SetPolicies([]throttle.Policy{{Name: "a", Match: []string{"x", "http:*"}, Windows: window}, {Name: "b", Match: []string{"*:call"}, Windows: window}})
	want := `throttle: policy "b": match "*:call": must not match a task type that policy "a" matches too, by "http:*"`
	That(t, errors.As(err, &bad) && err.Error() == want, err, "want", want)
	if p, _ := l.Match("mail:sent", false); p.Name != "all" {
		t.Error("policies that were refused hold")
	}
}
