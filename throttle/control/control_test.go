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

	"github.com/sluice-go/sluice/internal/servers"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func TestPublishedPoliciesAreInForceWhereALimiterFollows(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		s := newStore(t, client)
		own, late := newLimiter(t, throttle.Config{Client: client, Policies: []throttle.Policy{policy("p", 1)}}),
			newLimiter(t, throttle.Config{Client: client})
		follow(t, own, false)
		if got := own.Policies()[0].Windows[0].Limit; got != 1 {
			t.Fatalf("before anything is published the limit is %d, not the limiter's own", got)
		}
		everything := []throttle.Policy{{
			Name: "p", Match: []string{"a:*"}, Upstream: throttle.UpstreamShared, Windows: []throttle.Window{
				{Name: "hour", Limit: 3, Period: time.Hour},
				{Name: "all", Limit: 9, Period: time.Minute, Scope: throttle.ScopeShared, Algorithm: throttle.AlgorithmGCRA, Burst: 2},
				{Name: "user", Limit: 9, Period: time.Minute, Scope: throttle.Per("tenant", "user"), Algorithm: throttle.AlgorithmFixed},
				{Name: "month", Limit: 9, Algorithm: throttle.AlgorithmCalendar, Resets: "@monthly", Timezone: "Europe/Berlin"},
				{Name: "now", Limit: 9, Algorithm: throttle.AlgorithmConcurrency},
			},
			Tenants: map[string]throttle.Tenant{"acme": {Weight: 3, Windows: map[string]throttle.Override{"hour": {Limit: 2}}}},
		}}
		version, err := s.Publish(t.Context(), everything, 0, anna)
		must(t, err)
		limitertest.Until(t, "the limiter follows", func() bool { return own.Policies()[0].Windows[0].Limit == 3 })
		want := newLimiter(t, throttle.Config{Client: client, Policies: everything}).Policies()
		if got := own.Policies(); !reflect.DeepEqual(got, want) {
			t.Errorf("policies have changed on their way:\n%+v\n%+v", got, want)
		}
		follow(t, late, false)
		if got := late.Policies(); !reflect.DeepEqual(got, want) {
			t.Errorf("one that follows later has not at once what was published: %+v", got)
		}

		if again, err := s.Publish(t.Context(), everything, version, anna); err != nil || again != version {
			t.Errorf("the same policies, published again, have version %d, not %d; %v", again, version, err)
		}
		var bad *throttle.PolicyError
		if _, err := s.Publish(t.Context(), []throttle.Policy{policy("p", 0)}, version, anna); !errors.As(err, &bad) {
			t.Errorf("a limit of 0 was published: %v", err)
		}
		var conflict *control.ConflictError
		if _, err := s.Publish(t.Context(), []throttle.Policy{policy("p", 5)}, 0, anna); !errors.As(err, &conflict) || conflict.Version != version {
			t.Errorf("publishing over a version that nobody has read: %v", err)
		}
		if _, err := s.Publish(t.Context(), []throttle.Policy{policy("p", 5)}, version, control.By{Who: "anna"}); err == nil {
			t.Error("policies were published without a reason")
		}
		state, err := s.State(t.Context())
		must(t, err)
		if state.Version != version || !reflect.DeepEqual(state.Policies, want) {
			t.Errorf("refused policies have changed what is published: %+v", state)
		}
	})
}

func TestOfTwoPublishersOneWins(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		s := newStore(t, client)
		version := int64(0)
		for round := range 5 {
			var wins atomic.Int64
			before := version
			var all sync.WaitGroup
			for i := range 4 {
				all.Go(func() {
					v, err := s.Publish(t.Context(), []throttle.Policy{policy("p", int64(10*round+i+1))}, before, anna)
					var conflict *control.ConflictError
					switch {
					case err == nil:
						wins.Add(1)
						atomic.StoreInt64(&version, v)
					case !errors.As(err, &conflict):
						t.Error(err)
					}
				})
			}
			all.Wait()
			if n := wins.Load(); n != 1 {
				t.Fatalf("round %d: %d of 4 publishers have replaced the same version", round, n)
			}
		}
		if changes, err := s.Changes(t.Context(), "", 100); err != nil || len(changes) != 5 {
			t.Errorf("the log has %d changes, not 5: %v", len(changes), err)
		}
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
	l := newLimiter(t, throttle.Config{Client: client, Policies: []throttle.Policy{policy("p", 1)}})
	follow(t, l, false)
	if !granted(t, l, "p", "acme") || granted(t, l, "p", "acme") {
		t.Fatal("the limit is not 1")
	}
	three := throttle.TenantOverride{Policy: "p", Tenant: "acme", Windows: map[string]throttle.Override{"hour": {Limit: 3}}}
	must(t, s.SetOverride(t.Context(), three, time.Hour, anna))
	inForce := func(n int) func() bool { return func() bool { return len(l.Interventions().Overrides) == n } }
	limitertest.Until(t, "the override is in force", inForce(1))
	more := 0 // besides the first one
	for granted(t, l, "p", "acme") {
		more++
	}
	if more != 2 {
		t.Errorf("the tenant's limit is %d, want 3", 1+more)
	}
	if !granted(t, l, "p", "zeta") || granted(t, l, "p", "zeta") {
		t.Error("the limit of another tenant is not 1")
	}
	exempt := throttle.TenantOverride{Policy: "p", Tenant: "acme", Exempt: new(true)}
	must(t, s.SetOverride(t.Context(), exempt, time.Hour, anna))
	limitertest.Until(t, "the tenant is exempt", func() bool { return granted(t, l, "p", "acme") })
	state, err := s.State(t.Context())
	must(t, err)
	if len(state.Overrides) != 1 || state.Overrides[0].By != "anna" || state.Overrides[0].Why != "incident 7" || state.Overrides[0].Windows != nil {
		t.Errorf("in force: %+v", state.Overrides)
	}
	if left := state.Overrides[0].Until.Sub(state.At); left <= 59*time.Minute || left > time.Hour {
		t.Errorf("the override ends in %v", left)
	}
	found, err := s.ClearOverride(t.Context(), "p", "acme", anna)
	must(t, err)
	limitertest.Until(t, "it is cleared", inForce(0))
	if again, err := s.ClearOverride(t.Context(), "p", "acme", anna); !found || again || err != nil {
		t.Errorf("cleared: %v, and again: %v, %v", found, again, err)
	}
	if granted(t, l, "p", "acme") {
		t.Error("the limit is not 1 again")
	}

	// By the clock of Redis it ends by itself.
	must(t, s.SetOverride(t.Context(), exempt, 300*time.Millisecond, anna))
	limitertest.Until(t, "the tenant is exempt", func() bool { return granted(t, l, "p", "acme") })
	limitertest.Until(t, "it ends", func() bool { return !granted(t, l, "p", "acme") })

	for _, bad := range []throttle.TenantOverride{
		{Policy: "p", Tenant: "acme"},
		{Policy: "p", Exempt: new(true)},
		{Tenant: "acme", Exempt: new(true)},
		{Policy: "p", Tenant: "acme", Weight: -1},
		{Policy: "p", Tenant: "acme", Windows: map[string]throttle.Override{"hour": {}}},
		{Policy: "p", Tenant: strings.Repeat("x", 513), Exempt: new(true)},
	} {
		if err := s.SetOverride(t.Context(), bad, time.Hour, anna); err == nil {
			t.Errorf("%+v was put in force", bad)
		}
	}
	_, err = s.Publish(t.Context(), []throttle.Policy{policy("p", 1)}, 0, anna)
	must(t, err)
	var bad *throttle.PolicyError
	three.Windows["day"] = throttle.Override{Limit: 1}
	if err := s.SetOverride(t.Context(), three, time.Hour, anna); !errors.As(err, &bad) {
		t.Errorf("a window that the published policy has not was overridden: %v", err)
	}
}

func TestAPauseNamesAPublishedPolicy(t *testing.T) {
	client := throttletest.Client(t, throttletest.Miniredis(t).Addr())
	s := newStore(t, client)
	must(t, s.Pause(t.Context(), "githb-api", "", time.Hour, anna)) // while none are published, programs have their own
	_, err := s.Publish(t.Context(), []throttle.Policy{policy("github-api", 1)}, 0, anna)
	must(t, err)
	var bad *throttle.PolicyError
	if err := s.Pause(t.Context(), "githb-api", "acme", time.Hour, anna); !errors.As(err, &bad) || bad.Policy != "githb-api" {
		t.Errorf("a policy that is not published was paused: %v", err)
	}
	must(t, s.Pause(t.Context(), "github-api", "acme", time.Hour, anna))
	if found, err := s.Resume(t.Context(), "githb-api", "", anna); !found || err != nil {
		t.Errorf("a pause of a policy that is no longer published was not ended: %v", err)
	}
}

func TestInputIsCheckedBeforeWhatIsInForce(t *testing.T) {
	client := throttletest.Client(t, throttletest.Miniredis(t).Addr())
	s := newStore(t, client)
	policies := []throttle.Policy{policy("p", 1)}
	_, err := s.Publish(t.Context(), policies, 0, anna)
	must(t, err)
	weight := throttle.TenantOverride{Policy: "unknown", Tenant: "acme", Weight: 2}
	_, published := s.Publish(t.Context(), policies, 0, control.By{})
	for _, row := range []struct {
		name, want string
		err        error
	}{
		{"a version conflict, by nobody", "control: who", published},
		{"an override of an unknown policy, by nobody", "control: who", s.SetOverride(t.Context(), weight, time.Hour, control.By{})},
		{"a pause of an unknown policy, by nobody", "control: who", s.Pause(t.Context(), "unknown", "", time.Hour, control.By{})},
	} {
		if row.err == nil || !strings.HasPrefix(row.err.Error(), row.want) {
			t.Errorf("%s: %v, want %s", row.name, row.err, row.want)
		}
	}
	if changes, err := s.Changes(t.Context(), "", 10); err != nil || len(changes) != 1 {
		t.Errorf("the log has %+v, want the published policies alone: %v", changes, err)
	}
}

// Tenants are bytes. JSON knows text only.
func TestATenantThatIsNotTextIsPaused(t *testing.T) {
	client := throttletest.Client(t, throttletest.Miniredis(t).Addr())
	s, l := newStore(t, client), newLimiter(t, throttle.Config{Client: client, Policies: []throttle.Policy{policy("p", 2)}})
	must(t, s.Pause(t.Context(), "p", "a\xff %", time.Hour, anna))
	follow(t, l, false)
	if granted(t, l, "p", "a\xff %") || !granted(t, l, "p", "a\xfe %") {
		t.Error("another tenant than the one that was named is paused")
	}
}

func TestATenantThatIsNotTextIsNotPublished(t *testing.T) {
	client := throttletest.Client(t, throttletest.Miniredis(t).Addr())
	p := policy("p", 2)
	p.Tenants = map[string]throttle.Tenant{"a\xff": {Weight: 2}, "a\ufffd": {Weight: 3}}
	var invalid *throttle.PolicyError
	if _, err := newStore(t, client).Publish(t.Context(), []throttle.Policy{p}, 0, anna); !errors.As(err, &invalid) || invalid.Tenant != "a\xff" {
		t.Error(err)
	}
}

func TestTheLogTellsWhoChangedWhatAndWhy(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		s := newStore(t, client)
		version, err := s.Publish(t.Context(), []throttle.Policy{policy("p", 1), policy("q", 1)}, 0, anna)
		must(t, err)
		_, err = s.Publish(t.Context(), []throttle.Policy{policy("p", 2), policy("r", 1)}, version, control.By{Who: "ben", Why: "more"})
		must(t, err)
		must(t, s.SetOverride(t.Context(), throttle.TenantOverride{
			Policy: "p", Tenant: "a b\n", Weight: 2, Exempt: new(false), Windows: map[string]throttle.Override{"hour": {Limit: 7}},
		}, time.Minute, anna))
		must(t, s.Pause(t.Context(), "p", "", time.Hour, anna))
		_, err = s.Resume(t.Context(), "p", "", anna)
		must(t, err)
		_, err = s.Resume(t.Context(), "p", "", anna) // nothing to end, and nothing to log
		must(t, err)
		must(t, s.Record(t.Context(), control.Change{By: anna, What: control.WasReset, Policy: "p"}))
		all, err := s.Changes(t.Context(), "", 100)
		must(t, err)
		var got []string
		for i, c := range all {
			got = append(got, fmt.Sprintf("%s %s/%q by %s: %s (%s)", c.What, c.Policy, c.Tenant, c.Who, c.Why, c.Text))
			if i > 0 && (c.Version != all[i-1].Version-1 || c.At.IsZero()) {
				t.Errorf("change %d: %+v", i, c)
			}
		}
		want := []string{
			`reset p/"" by anna: incident 7 ()`,
			`resume p/"" by anna: incident 7 ()`,
			`pause p/"" by anna: incident 7 (for 1h)`,
			`override p/"a b\n" by anna: incident 7 (hour 7, weight 2, not exempt for 1m)`,
			`publish /"" by ben: more (added r, added r/hour, p/hour 1/h -> 2/h, removed q, removed q/hour)`,
			`publish /"" by anna: incident 7 (added p, added p/hour, added q, added q/hour)`,
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("the log:\n%s", strings.Join(got, "\n"))
		}
		page, err := s.Changes(t.Context(), all[1].ID, 2)
		must(t, err)
		if len(page) != 2 || page[0].ID != all[2].ID {
			t.Errorf("the second page: %+v", page)
		}
	})
}

// An override that ends while tickets wait lets them go on at once.
func TestAnOverrideEndsWhileTicketsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := throttletest.InMemory(t).Client(t)
		s, l := newStore(t, client), newLimiter(t, throttle.Config{Client: client, Policies: []throttle.Policy{policy("p", 4)}})
		follow(t, l, false)
		cut := throttle.TenantOverride{Policy: "p", Tenant: "acme", Windows: map[string]throttle.Override{"hour": {Limit: 1}}}
		must(t, s.SetOverride(t.Context(), cut, 25*time.Second, anna))
		synctest.Wait()
		begun, line := time.Now(), l.Line("p")
		var requests []throttle.Request
		for i := range 3 {
			requests = append(requests, throttle.Request{Tenant: "acme", Ticket: throttle.Ticket{Queue: "q", ID: fmt.Sprint(i)}})
		}
		_, err := line.Join(t.Context(), requests)
		must(t, err)
		var at []time.Duration
		for range 29 { // a server asks each second
			taken, err := line.Take(t.Context(), throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: 8})
			must(t, err)
			for range taken.Tickets {
				at = append(at, time.Since(begun))
			}
			time.Sleep(time.Second)
		}
		if len(at) != 3 || at[0] != 0 || at[1] < 25*time.Second || at[2] > 25*time.Second+time.Second {
			t.Errorf("tickets were taken at %v", at)
		}
	})
}

func TestTheLogHasOldAndNewValues(t *testing.T) {
	client := throttletest.Client(t, throttletest.Miniredis(t).Addr())
	s, ben := newStore(t, client), control.By{Who: "ben", Why: "more"}
	before := []throttle.Policy{{Name: "p", Windows: []throttle.Window{
		{Name: "a", Limit: 10, Period: time.Second}, {Name: "b", Limit: 5, Period: 7 * time.Second, Algorithm: throttle.AlgorithmGCRA, Burst: 2},
		{Name: "c", Limit: 3, Algorithm: throttle.AlgorithmConcurrency},
	}}}
	version, err := s.Publish(t.Context(), before, 0, anna)
	must(t, err)
	now := []throttle.Policy{{Name: "p", Match: []string{"x"}, Windows: slices.Clone(before[0].Windows)}}
	now[0].Windows[0].Limit, now[0].Windows[1].Burst, now[0].Windows[2].Limit = 15, 3, 4
	_, err = s.Publish(t.Context(), now, version, ben)
	must(t, err)
	must(t, s.SetOverride(t.Context(), throttle.TenantOverride{Policy: "p", Tenant: "acme", Weight: 2}, time.Hour, anna))
	must(t, s.SetOverride(t.Context(), throttle.TenantOverride{Policy: "p", Tenant: "acme", Weight: 3}, time.Hour, ben))
	must(t, s.SetOverride(t.Context(), throttle.TenantOverride{Policy: "p", Tenant: "zeta", Weight: 3}, time.Hour, ben))
	must(t, s.Pause(t.Context(), "p", "acme", time.Hour, anna))
	must(t, s.Pause(t.Context(), "p", "acme", time.Hour, ben))
	changes, err := s.Changes(t.Context(), "", 10)
	must(t, err)
	for i, want := range map[int]string{
		0: "for 1h, in place of a pause until TIME by anna: incident 7",
		2: "weight 3 for 1h",
		3: "weight 3 for 1h, in place of weight 2 until TIME by anna: incident 7",
		5: "changed p, p/a 10/s -> 15/s, p/b 5/7s, burst 2 -> 5/7s, burst 3, p/c 3/at once -> 4/at once",
	} {
		if got := regexp.MustCompile(`\d{4}-\S+ \S+ UTC`).ReplaceAllString(changes[i].Text, "TIME"); got != want {
			t.Errorf("change %d: %s\nwant %s", i, got, want)
		}
	}
	// Earlier policies can be published again.
	if got := control.Differences(changes[6].Policies, before); got != "" || len(changes[6].Policies) != 1 {
		t.Errorf("the log has other policies than were published: %s", got)
	}
}
