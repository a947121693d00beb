package limitertest

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/servers"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// found fails unless the check finds just this, or nothing if it is empty.
func found(t *testing.T, client redis.UniversalClient, want string) {
	t.Helper()
	findings, err := New(t, client, three()).CheckRedis(t.Context())
	switch {
	case err != nil:
		t.Error(err)
	case want == "" && len(findings) > 0, want != "" && (len(findings) != 1 || !strings.Contains(findings[0], want)):
		t.Errorf("found %q, want %q", findings, want)
	}
}

func TestCheckRedisFindsWhatIsNotSetUp(t *testing.T) {
	t.Parallel()
	t.Run("redis", func(t *testing.T) {
		t.Parallel()
		ctx, primary := t.Context(), throttletest.Redis(t)
		client := throttletest.Client(t, primary)
		found(t, client, "")
		client.ConfigSet(ctx, "maxmemory-policy", "allkeys-lru")
		found(t, client, "redis "+primary+": maxmemory-policy is allkeys-lru: must be noeviction")
		client.ConfigSet(ctx, "maxmemory-policy", "noeviction")
		expect.Must(t, client.Do(ctx, "acl", "setuser", "meek", "on", "nopass", "~*", "+@all", "-info").Err())
		meek := redis.NewClient(&redis.Options{Addr: primary, Username: "meek", Password: "any"})
		defer meek.Close()
		found(t, meek, "")
		replica := throttletest.Client(t, throttletest.Redis(t, "--replicaof", strings.Replace(primary, ":", " ", 1), "--maxmemory-policy", "allkeys-lru"))
		refusal := expect.ErrOf(New(t, replica, three()).CheckRedis(ctx))
		expect.That(t, strings.Contains(fmt.Sprint(refusal), "READONLY"), "of a replica it says", refusal)
	})
	t.Run("cluster", func(t *testing.T) {
		t.Parallel()
		c := servers.Cluster(t, 2, 0)
		client := c.Client(t)
		found(t, client, "")
		for _, node := range c.Nodes {
			admin := throttletest.Client(t, node.Addr)
			admin.ConfigSet(t.Context(), "maxmemory-policy", "volatile-ttl")
			found(t, client, "redis "+node.Addr+": maxmemory-policy is volatile-ttl")
			admin.ConfigSet(t.Context(), "maxmemory-policy", "noeviction")
		}
		var refusals []error
		for _, node := range c.Nodes {
			refusals = append(refusals, expect.ErrOf(New(t, throttletest.Client(t, node.Addr), three()).CheckRedis(t.Context())))
		}
		expect.That(t, strings.Contains(fmt.Sprint(refusals), "MOVED"), "of a node of a Cluster it says", refusals)
	})
	t.Run("miniredis", func(t *testing.T) {
		t.Parallel()
		m := throttletest.Miniredis(t)
		client := throttletest.Client(t, m.Addr())
		found(t, client, "")
		m.SetTime(time.Now().Add(-time.Minute))
		found(t, client, "off this machine's")
		m.SetTime(time.Now().Add(time.Minute))
		found(t, client, "off this machine's")
		m.SetTime(time.Time{})
		gone := impatient(t, m.Addr())
		m.Close()
		expect.Err(t, expect.ErrOf(New(t, gone, three()).CheckRedis(t.Context())), throttle.ErrUnavailable)
	})
}

// A user that may not call what the limiter needs is told of each command, and errors are of a kind of their own.
func TestARefusedUserIsAKindOfItsOwn(t *testing.T) {
	t.Parallel()
	addr := throttletest.Redis(t)
	admin := throttletest.Client(t, addr)
	limiter := func(user, password string, rules ...any) *throttle.Limiter {
		t.Helper()
		if err := admin.Do(t.Context(), append([]any{"acl", "setuser", user}, rules...)...).Err(); len(rules) > 0 && err != nil {
			t.Fatal(err)
		}
		client := redis.NewClient(&redis.Options{Addr: addr, Username: user, Password: password, MaxRetries: -1})
		t.Cleanup(func() { client.Close() })
		return New(t, client, three())
	}
	forbidden := func(err error, text string) {
		t.Helper()
		expect.That(t, errors.Is(err, throttle.ErrForbidden) && errors.Is(err, throttle.ErrUnavailable) &&
			strings.Contains(err.Error(), text), err, "want one of a refused user with", text)
	}
	for name, l := range map[string]*throttle.Limiter{
		"no script":   limiter("plain", "any", "on", "nopass", "~*", "+@all", "-evalsha", "-eval"),
		"no such key": limiter("elsewhere", "any", "on", "nopass", "~other:*", "+@all"),
		"no command":  limiter("half", "any", "on", "nopass", "~*", "+@all", "-set", "-zscan"),
		"a stranger":  limiter("nobody", "wrong"),
	} {
		_, err := l.Reserve(t.Context(), Acme(1))
		_, checked := l.CheckRedis(t.Context())
		for _, err := range []error{err, l.Ping(t.Context()), checked} {
			expect.That(t, errors.Is(err, throttle.ErrForbidden) && errors.Is(err, throttle.ErrUnavailable), name, err)
		}
	}
	half := limiter("half", "any")
	forbidden(half.Ping(t.Context()), "its user may not call set, zscan")
	findings, err := half.CheckRedis(t.Context())
	forbidden(err, "set, zscan")
	expect.That(t, len(findings) == 1 && strings.Contains(findings[0], "may not call set, zscan: must be allowed"), findings)
	expect.Must(t, limiter("good", "any", "on", "nopass", "~*", "+@all").Ping(t.Context()))
	expect.Equal(t, len(admin.Keys(t.Context(), "*").Val()), 0)
}
