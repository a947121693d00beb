package control_test

import (
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/servers"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func TestPublishedPoliciesAreInForceWhereALimiterFollows(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		s := newStore(t, client)
		configured, late := limitertest.New(t, client, hourly("p", 1)), limitertest.New(t, client)
		follow(t, configured, false)
		expect.Equal(t, configured.Policies()[0].Windows[0].Limit, 1, "before anything is published")
		everything := []throttle.Policy{{
			Name: "p", Match: []string{"a:*"}, UpstreamShared: true, Windows: []throttle.Window{
				{Name: "hour", Limit: 3, Period: time.Hour},
				{Name: "all", Limit: 9, Period: time.Minute, Shared: true, Algorithm: throttle.AlgorithmGCRA, Burst: 2},
				{Name: "user", Limit: 9, Period: time.Minute, Per: []string{"tenant", "user"}, Algorithm: throttle.AlgorithmFixed},
				{Name: "month", Limit: 9, Algorithm: throttle.AlgorithmCalendar, Resets: "@monthly", Timezone: "Europe/Berlin"},
				{Name: "now", Limit: 9, Algorithm: throttle.AlgorithmConcurrency},
			},
			Tenants: map[string]throttle.Tenant{"acme": {Weight: 3, Windows: map[string]throttle.Override{"hour": {Limit: 2}}}},
		}}
		version := publish(t, s, 0, everything...)
		limitertest.Until(t, "the limiter follows", func() bool { return configured.Policies()[0].Windows[0].Limit == 3 })
		want := limitertest.New(t, client, everything...).Policies()
		expect.Equal(t, configured.Policies(), want, "policies have changed on their way")
		follow(t, late, false)
		expect.Equal(t, late.Policies(), want, "one that follows later has not at once what was published")

		again, err := s.Publish(t.Context(), everything, version, anna)
		expect.That(t, err == nil && again == version, "the same policies, published again, have version", again, version, err)
		_, err = s.Publish(t.Context(), []throttle.Policy{hourly("p", 0)}, version, anna)
		expect.Err(t, err, new(*throttle.PolicyError), "a limit of 0")
		_, err = s.Publish(t.Context(), []throttle.Policy{hourly("p", 5)}, 0, anna)
		expect.That(t, errors.Is(err, control.ErrConflict), "over a version that nobody has read", err)
		_, err = s.Publish(t.Context(), []throttle.Policy{hourly("p", 5)}, version, control.Author{Who: "anna"})
		expect.That(t, err != nil, "policies were published without a reason")
		state := state(t, s)
		expect.That(t, state.Version == version && reflect.DeepEqual(state.Policies, want),
			"refused policies have changed what is published", state)
	})
}

func TestOfTwoPublishersOneWins(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		client.AddHook(hooktest.Hook(hooktest.Twice))
		s, version := newStore(t, client), int64(0)
		for round := range 5 {
			var wins atomic.Int64
			replaced := version
			var all sync.WaitGroup
			for i := range 4 {
				all.Go(func() {
					v, err := s.Publish(t.Context(), []throttle.Policy{hourly("p", int64(10*round+i+1))}, replaced, anna)
					switch {
					case err == nil:
						wins.Add(1)
						atomic.StoreInt64(&version, v)
					case !errors.Is(err, control.ErrConflict):
						t.Error(err)
					}
				})
			}
			all.Wait()
			expect.Require(t, wins.Load() == 1, "round", round, wins.Load(), "of 4 publishers have replaced the same version")
		}
		changes, err := s.Changes(t.Context(), 100)
		expect.That(t, err == nil && len(changes) == 5, "the log has", len(changes), "changes, not 5", err)
	})
}

func TestOverridesOfATenant(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) { overrideATenant(t, client) })
	t.Run("cluster", func(t *testing.T) {
		t.Parallel()
		client := redis.NewClusterClient(&redis.ClusterOptions{Addrs: servers.Cluster(t, 2, 0).Addrs()})
		defer client.Close()
		overrideATenant(t, client)
	})
}

func overrideATenant(t *testing.T, client redis.UniversalClient) {
	s := newStore(t, client)
	l := limitertest.New(t, client, hourly("p", 1))
	follow(t, l, false)
	expect.Require(t, granted(t, l, "p", "acme") && !granted(t, l, "p", "acme"), "the limit is not 1")
	three := throttle.TenantOverride{Policy: "p", Tenant: "acme", Windows: map[string]throttle.Override{"hour": {Limit: 3}}}
	expect.Must(t, s.SetOverride(t.Context(), three, time.Hour, anna))
	inForce := func(n int) func() bool { return func() bool { return len(l.Interventions().Overrides) == n } }
	limitertest.Until(t, "the override is in force", inForce(1))
	more := 0 // besides the first one
	for granted(t, l, "p", "acme") {
		more++
	}
	expect.Equal(t, more, 2, "the tenant's limit is", 1+more)
	expect.That(t, granted(t, l, "p", "zeta") && !granted(t, l, "p", "zeta"), "the limit of another tenant is not 1")
	exempt := throttle.TenantOverride{Policy: "p", Tenant: "acme", Exempt: new(true)}
	expect.Must(t, s.SetOverride(t.Context(), exempt, time.Hour, anna))
	limitertest.Until(t, "the tenant is exempt", func() bool { return granted(t, l, "p", "acme") })
	state := state(t, s)
	expect.Require(t, len(state.Overrides) == 1, state)
	in := state.Overrides[0]
	expect.That(t, in.Author == "anna" && in.Why == "incident 7" && in.Windows == nil, in)
	left := state.Overrides[0].Until.Sub(state.At)
	expect.That(t, left > 59*time.Minute && left <= time.Hour, "the override ends in", left)
	found := expect.Got(s.End(t.Context(), control.Cleared, "p", "acme", anna))(t)
	limitertest.Until(t, "it is cleared", inForce(0))
	again, err := s.End(t.Context(), control.Cleared, "p", "acme", anna)
	expect.That(t, found && !again && err == nil, "cleared", found, "and again", again, err)
	expect.That(t, !granted(t, l, "p", "acme"), "the limit is not 1 again")

	// By the clock of Redis it ends by itself.
	expect.Must(t, s.SetOverride(t.Context(), exempt, 1500*time.Millisecond, anna))
	limitertest.Until(t, "the tenant is exempt", func() bool { return granted(t, l, "p", "acme") })
	limitertest.Until(t, "it ends", func() bool { return !granted(t, l, "p", "acme") })

	for _, bad := range []throttle.TenantOverride{
		{Policy: "p", Tenant: "acme"},
		{Policy: "p", Exempt: new(true)},
		{Tenant: "acme", Exempt: new(true)},
		{Policy: "p", Tenant: "acme", Weight: -1},
		{Policy: "p", Tenant: strings.Repeat("x", 513), Exempt: new(true)},
	} {
		expect.That(t, s.SetOverride(t.Context(), bad, time.Hour, anna) != nil, bad, "was put in force")
	}
	publish(t, s, 0, hourly("p", 1))
	three.Windows["day"] = throttle.Override{Limit: 1} // which the published policy has not
	expect.Err(t, s.SetOverride(t.Context(), three, time.Hour, anna), new(*throttle.PolicyError))
}

func TestAPauseNamesAPublishedPolicy(t *testing.T) {
	s := newStore(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()))
	expect.Must(t, s.Pause(t.Context(), "githb-api", "", time.Hour, anna)) // while none are published, programs have their own
	publish(t, s, 0, hourly("github-api", 1))
	var bad *throttle.PolicyError
	err := s.Pause(t.Context(), "githb-api", "acme", time.Hour, anna)
	expect.That(t, errors.As(err, &bad) && bad.Policy == "githb-api", "a policy that is not published was paused", err)
	expect.Must(t, s.Pause(t.Context(), "github-api", "acme", time.Hour, anna))
	found, err := s.End(t.Context(), control.Resumed, "githb-api", "", anna)
	expect.That(t, found && err == nil, "a pause of a policy that is no longer published was not ended", err)
}

func TestInputIsCheckedBeforeWhatIsInForce(t *testing.T) {
	s := newStore(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()))
	policies := []throttle.Policy{hourly("p", 1)}
	publish(t, s, 0, policies...)
	weight := throttle.TenantOverride{Policy: "unknown", Tenant: "acme", Weight: 2}
	_, published := s.Publish(t.Context(), policies, 0, control.Author{})
	for _, row := range []struct {
		name, want string
		err        error
	}{
		{"a version conflict, by nobody", "control: who", published},
		{"an override of an unknown policy, by nobody", "control: who", s.SetOverride(t.Context(), weight, time.Hour, control.Author{})},
		{"a pause of an unknown policy, by nobody", "control: who", s.Pause(t.Context(), "unknown", "", time.Hour, control.Author{})},
	} {
		expect.That(t, row.err != nil && strings.HasPrefix(row.err.Error(), row.want),
			row.name, row.err, "want", row.want)
	}
	changes, err := s.Changes(t.Context(), 10)
	expect.That(t, err == nil && len(changes) == 1, "the log has", changes, "want the published policies alone", err)
}

// Tenants are bytes. JSON knows text only.
func TestATenantThatIsNotTextIsPaused(t *testing.T) {
	client := throttletest.Client(t, throttletest.Miniredis(t).Addr())
	s, l := newStore(t, client), limitertest.New(t, client, hourly("p", 2))
	expect.Must(t, s.Pause(t.Context(), "p", "a\xff %", time.Hour, anna))
	follow(t, l, false)
	expect.That(t, !granted(t, l, "p", "a\xff %") && granted(t, l, "p", "a\xfe %"),
		"another tenant than the one that was named is paused")
}

func TestATenantThatIsNotTextIsNotPublished(t *testing.T) {
	client := throttletest.Client(t, throttletest.Miniredis(t).Addr())
	p := hourly("p", 2)
	p.Tenants = map[string]throttle.Tenant{"a\xff": {Weight: 2}, "a\ufffd": {Weight: 3}}
	var invalid *throttle.PolicyError
	s := newStore(t, client)
	_, err := s.Publish(t.Context(), []throttle.Policy{p}, 0, anna)
	expect.That(t, errors.As(err, &invalid) && invalid.Tenant == "a\xff", err)
	p.Tenants, p.Match = nil, []string{"b\xff*"}
	_, err = s.Publish(t.Context(), []throttle.Policy{p}, 0, anna)
	expect.That(t, errors.As(err, &invalid) && invalid.Field == "match", err)
}

func TestTheLogTellsWhoChangedWhatAndWhy(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		s := newStore(t, client)
		version := publish(t, s, 0, hourly("p", 1), hourly("q", 1))
		after := []throttle.Policy{hourly("p", 2), hourly("r", 1)}
		expect.Must(t, expect.ErrOf(s.Publish(t.Context(), after, version, control.Author{Who: "ben", Why: "more"})))
		expect.Must(t, s.SetOverride(t.Context(), throttle.TenantOverride{
			Policy: "p", Tenant: "a b\n", Weight: 2, Exempt: new(false), Windows: map[string]throttle.Override{"hour": {Limit: 7}},
		}, time.Minute, anna))
		expect.Must(t, s.Pause(t.Context(), "p", "", time.Hour, anna))
		for range 2 { // the second has nothing to end, and nothing to log
			expect.Must(t, expect.ErrOf(s.End(t.Context(), control.Resumed, "p", "", anna)))
		}
		expect.Must(t, s.Record(t.Context(), control.Change{Author: anna, Kind: control.WasReset, Policy: "p"}))
		all := changes(t, s, 100)
		var got []string
		for i, c := range all {
			got = append(got, fmt.Sprintf("%s %s/%q by %s: %s (%s)", c.Kind, c.Policy, c.Tenant, c.Who, c.Why, c.Text))
			expect.That(t, i <= 0 || c.Version == all[i-1].Version-1 && !c.At.IsZero(), "change", i, c)
		}
		want := []string{
			`reset p/"" by anna: incident 7 ()`, `resume p/"" by anna: incident 7 ()`,
			`pause p/"" by anna: incident 7 (for 1h)`,
			`override p/"a b\n" by anna: incident 7 (hour 7, weight 2, not exempt for 1m)`,
			`publish /"" by ben: more (added r, added r/hour, p/hour 1/h -> 2/h, removed q, removed q/hour)`,
			`publish /"" by anna: incident 7 (added p, added p/hour, added q, added q/hour)`,
		}
		expect.Equal(t, got, want)
		newest := changes(t, s, 2)
		expect.That(t, len(newest) == 2 && newest[1].ID == all[1].ID, "the newest two", newest)
	})
}

// An override that ends while tickets wait lets them go on at once.
func TestAnOverrideEndsWhileTicketsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := throttletest.InMemory(t).Client(t)
		s, l := newStore(t, client), limitertest.New(t, client, hourly("p", 4))
		follow(t, l, false)
		cut := throttle.TenantOverride{Policy: "p", Tenant: "acme", Windows: map[string]throttle.Override{"hour": {Limit: 1}}}
		expect.Must(t, s.SetOverride(t.Context(), cut, 25*time.Second, anna))
		time.Sleep(time.Second)
		begun, line := time.Now(), l.Line("p")
		var requests []throttle.Request
		for i := range 3 {
			requests = append(requests, throttle.Request{Tenant: "acme", Ticket: throttle.Ticket{Queue: "q", ID: fmt.Sprint(i)}})
		}
		expect.Must(t, expect.ErrOf(line.Join(t.Context(), requests)))
		var at []time.Duration
		for range 29 { // a server asks each second
			taken := expect.Got(line.Take(t.Context(), throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: 8}))(t)
			for range taken.Tickets {
				at = append(at, time.Since(begun))
			}
			time.Sleep(time.Second)
		}
		expect.Require(t, len(at) == 3, at)
		expect.That(t, at[0] == 0 && at[1] >= 24*time.Second && at[2] <= 25*time.Second, "tickets were taken at", at)
	})
}

func TestTheLogHasOldAndNewValues(t *testing.T) {
	client := throttletest.Client(t, throttletest.Miniredis(t).Addr())
	s, ben := newStore(t, client), control.Author{Who: "ben", Why: "more"}
	before := []throttle.Policy{{Name: "p", Windows: []throttle.Window{
		{Name: "a", Limit: 10, Period: time.Second}, {Name: "b", Limit: 5, Period: 7 * time.Second, Algorithm: throttle.AlgorithmGCRA, Burst: 2},
		{Name: "c", Limit: 3, Algorithm: throttle.AlgorithmConcurrency},
	}}}
	version := publish(t, s, 0, before...)
	now := []throttle.Policy{{Name: "p", Match: []string{"x"}, Windows: slices.Clone(before[0].Windows)}}
	now[0].Windows[0].Limit, now[0].Windows[1].Burst, now[0].Windows[2].Limit = 15, 3, 4
	expect.Must(t, expect.ErrOf(s.Publish(t.Context(), now, version, ben)))
	expect.Must(t, s.SetOverride(t.Context(), throttle.TenantOverride{Policy: "p", Tenant: "acme", Weight: 2}, time.Hour, anna))
	expect.Must(t, s.SetOverride(t.Context(), throttle.TenantOverride{Policy: "p", Tenant: "acme", Weight: 3}, time.Hour, ben))
	expect.Must(t, s.SetOverride(t.Context(), throttle.TenantOverride{Policy: "p", Tenant: "zeta", Weight: 3}, time.Hour, ben))
	expect.Must(t, s.Pause(t.Context(), "p", "acme", time.Hour, anna))
	expect.Must(t, s.Pause(t.Context(), "p", "acme", time.Hour, ben))
	changes := changes(t, s, 10)
	for i, want := range map[int]string{
		0: "for 1h, instead of a pause until TIME by anna: incident 7",
		2: "weight 3 for 1h",
		3: "weight 3 for 1h, instead of weight 2 until TIME by anna: incident 7",
		5: "changed p, p/a 10/s -> 15/s, p/b 5/7s, burst 2 -> 5/7s, burst 3, p/c 3/at once -> 4/at once",
	} {
		expect.Equal(t, regexp.MustCompile(`\d{4}-\S+ \S+ UTC`).ReplaceAllString(changes[i].Text, "TIME"), want, i)
	}
	// Earlier policies can be published again.
	got := control.Differences(changes[6].Policies, before)
	expect.That(t, got == "" && len(changes[6].Policies) == 1, "the log has other policies than were published", got)
}
