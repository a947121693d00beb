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
	matched := func(taskType string) string { p, _ := l.Match(taskType, false); return p.Name }
	for range 2 { // the second time remembered
		for taskType, want := range map[string]string{"http:call": "http", "rpc:x": "http", "rpc:xy": "", "mail:send": "mail", "mail:sent": "", "": "", "by-name-only": ""} {
			p, ok := l.Match(taskType, false)
			Equal(t, p.Name, want, taskType)
			Equal(t, ok, want != "", taskType)
		}
	}
	for i := range 20_000 { // more types than are remembered
		Equal(t, matched(fmt.Sprint("http:", i)), "http")
	}
	Must(t, l.SetPolicies([]throttle.Policy{{Name: "all", Match: []string{"*"}, Windows: window}}))
	Equal(t, matched("mail:sent"), "all")
	if p, ok := l.Lookup("http"); !ok || p.Name != "http" || len(l.Policies()) != 1 {
		t.Errorf("a policy that was replaced: %+v, %v", p, ok)
	}

	var bad *throttle.PolicyError
	err := l.SetPolicies([]throttle.Policy{{Name: "a", Match: []string{"x", "http:*"}, Windows: window}, {Name: "b", Match: []string{"*:call"}, Windows: window}})
	want := `throttle: policy "b": match "*:call": must not match a task type that policy "a" matches too, by "http:*"`
	That(t, errors.As(err, &bad) && err.Error() == want, err, "want", want)
	Equal(t, matched("mail:sent"), "all", "policies that were refused hold")
}
