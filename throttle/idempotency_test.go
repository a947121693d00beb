package throttle_test

import (
	"context"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func TestSameKeyIsChargedOnce(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l, c := newHanded(t, client, three())
		r := acme(5)
		r.IdempotencyKey = "n"
		first := reserve(t, l, r)
		before := dump(t, client)
		c.Set(3 * s)
		again := reserve(t, l, r)
		if !again.Granted || !again.At.Equal(first.At) || !again.Reservation.At.Equal(first.At) || again.RetryIn != 0 {
			t.Errorf("granted %v at %v, want the time of the first, %v", again.Granted, again.At, first.At)
		}
		if !slices.Equal(used(again), []int64{5, 5, 2}) {
			t.Errorf("used %v", used(again))
		}
		for i, want := range []time.Duration{10 * s, 10 * s, 5 * s} {
			if got := again.Windows[i]; !got.ResetsAt.Equal(at(want)) || got.Denied {
				t.Errorf("window %s resets at %v, denied %v", got.Name, got.ResetsAt, got.Denied)
			}
		}
		if after := dump(t, client); !maps.Equal(before, after) {
			t.Errorf("Redis was changed:\n%q\n%q", before, after)
		}
		r.IdempotencyKey = "another"
		if d := reserve(t, l, r); !slices.Equal(used(d), []int64{10, 10, 7}) {
			t.Errorf("another key: used %v", used(d))
		}
		// Also when nothing would fit any more.
		r.IdempotencyKey = "n"
		if d := reserve(t, l, r); !d.Granted || !d.At.Equal(first.At) {
			t.Errorf("granted %v at %v", d.Granted, d.At)
		}
	})
}

// A key is its tenant's own: one tenant's call is never taken for another's, nor given back by it.
func TestKeyOfOneTenantIsNotAnothers(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l, _ := newHanded(t, client, policy(sharedWindow(10, 10*s)))
		of := func(tenant, key string) throttle.Reservation {
			t.Helper()
			r := acme(1)
			r.Tenant, r.IdempotencyKey = tenant, key
			d := reserve(t, l, r)
			if !d.Granted {
				t.Fatalf("%q, %q: denied", tenant, key)
			}
			return d.Reservation
		}
		ids := map[string]bool{}
		var all []throttle.Reservation
		for _, pair := range [][2]string{{"acme", "n"}, {"beta", "n"}, {"acme:n", "n"}, {"acme", "n:n"}, {"", "acme:n"}} {
			r := of(pair[0], pair[1])
			ids[r.ID], all = true, append(all, r)
		}
		wantUsed := func(want int64) {
			t.Helper()
			if used := peek(t, l, acme(1)).Windows[0].Used; used != want {
				t.Errorf("%d are counted, want %d", used, want)
			}
		}
		wantUsed(5)
		if len(ids) != 5 {
			t.Errorf("the reservations are %v", ids)
		}
		cancel(t, l, all[1])
		wantUsed(4)
		if again := of("acme", "n"); again.ID != all[0].ID {
			t.Errorf("repeated: %s, want %s", again.ID, all[0].ID)
		}
		wantUsed(4)
	})
}

func TestDeniedKeyMayBeReservedLater(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l, c := newHanded(t, client, three())
		reserve(t, l, acme(10))
		r := acme(1)
		r.IdempotencyKey = "n"
		if d := reserve(t, l, r); d.Granted {
			t.Fatal("granted")
		}
		c.Set(10 * s)
		if d := reserve(t, l, r); !d.Granted || !slices.Equal(used(d), []int64{1, 1, 1}) {
			t.Errorf("granted %v, used %v", d.Granted, used(d))
		}
	})
}

// go-redis repeats a call whose connection broke.
func TestLostReplyIsChargedOnce(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		p := newProxy(t, client.Options().Addr)
		l := newLimiter(t, throttletest.Client(t, p.Addr), policy(throttle.Window{Name: "w", Limit: 10, Period: 24 * h}))
		peek(t, l, acme(1)) // loads the script

		p.Lose.Store(2)
		d := reserve(t, l, acme(3))
		if p.Lost.Load() != 2 {
			t.Fatalf("%d replies lost, want 2", p.Lost.Load())
		}
		if !d.Granted || d.Windows[0].Used != 3 {
			t.Errorf("granted %v, used %d", d.Granted, d.Windows[0].Used)
		}
		other := reserve(t, l, acme(2))
		again := other.Reservation
		if other.Windows[0].Used != 5 {
			t.Errorf("used %d, want 5", other.Windows[0].Used)
		}

		p.Lose.Store(2)
		if d := cancel(t, l, again); p.Lost.Load() != 4 || d.Windows[0].Used != 3 {
			t.Errorf("%d replies lost, used %d", p.Lost.Load(), d.Windows[0].Used)
		}
		if d := cancel(t, l, d.Reservation); d.Windows[0].Used != 0 {
			t.Errorf("used %d", d.Windows[0].Used)
		}
	})
}

// repeatAt sends every script call at each of the times: all replies but the last are lost.
func repeatAt(times ...time.Duration) hooktest.Hook {
	return func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) (err error) {
		if !hooktest.IsScript(cmd) {
			return next(ctx, cmd)
		}
		for _, time := range times {
			cmd.Args()[4] = midnight + time.Microseconds()
			if err = next(ctx, cmd); err != nil {
				return err
			}
		}
		return nil
	}
}

// A batch whose reply was lost may be decided differently when it is repeated: a denied request may
// fit by then. Repeated once more, it is not charged again.
func TestWhatARepeatedBatchGrantsIsChargedOnce(t *testing.T) {
	p := policy(throttle.Window{Name: "w", Limit: 2, Period: 10 * s})
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l, c := newHanded(t, client, p)
		reserve(t, l, acme(1))
		repeating := redis.NewClient(client.Options())
		defer repeating.Close()
		repeating.AddHook(repeatAt(1*s, 10*s+500*ms, 10*s+600*ms))
		other := newEdited(t, repeating, newMidnight(), []func(string) string{limitertest.WithoutExpiry}, p)
		decisions := other.Together(t, limitertest.Call{Request: acme(1)}, limitertest.Call{Request: acme(1)})
		if !decisions[0].Granted || !decisions[0].At.Equal(at(1*s)) || !decisions[1].Granted || !decisions[1].At.Equal(at(10*s+500*ms)) {
			t.Fatalf("%+v", decisions)
		}
		c.Set(10*s + 700*ms)
		if d := peek(t, l, acme(1)); d.Windows[0].Used != 2 {
			t.Errorf("%d are counted, want 2", d.Windows[0].Used)
		}
		cancel(t, l, decisions[1].Reservation)
		if d := peek(t, l, acme(1)); d.Windows[0].Used != 1 {
			t.Errorf("%d are counted, want 1", d.Windows[0].Used)
		}
	})
}
