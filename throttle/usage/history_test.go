package usage_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/throttle/usage"
)

// Grants, refusals and tickets in line are kept by the minute, for a day.
func TestWhatPoliciesDidIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		memory := throttletest.InMemory(t)
		client := memory.Client(t)
		decided, want := 0, int64(0)
		counter := usage.New()
		limiter, err := throttle.New(throttle.Config{
			Client: client, Observer: counter.Observer(throttle.Observer{Decided: func(d throttle.Decision) {
				decided++
				if d.Granted {
					want++
				}
			}}),
			Policies: []throttle.Policy{{Name: "p", Windows: []throttle.Window{{Name: "w", Limit: 3, Period: time.Hour}}}, {Name: "idle",
				Windows: []throttle.Window{{Name: "w", Limit: 3, Period: time.Hour}}}},
		})
		limitertest.Must(t, err)
		stop := counter.Start(limiter)
		for i := range 5 {
			r := throttle.Request{Policy: "p", Tenant: "acme", Ticket: throttle.Ticket{Queue: "q", ID: fmt.Sprint(i)}}
			d, err := limiter.Reserve(t.Context(), r)
			limitertest.Must(t, err)
			if i == 0 {
				limitertest.Must(t, limitertest.Err(d.Reservation.Pause(t.Context(), time.Second, "")))
				time.Sleep(2 * time.Second)
			}
		}
		time.Sleep(3 * time.Minute)
		stop()
		points, err := usage.History(t.Context(), limiter, []string{"p", "idle"}, time.Now().Add(-time.Hour))
		limitertest.Must(t, err)
		var granted, refused int64
		for _, p := range points["p"] {
			granted, refused = granted+p.Granted, refused+p.Refused
		}
		last := points["p"][len(points["p"])-1]
		limitertest.That(t, granted == want && want != 0 && refused == 1 && last.Waiting == 5-want && decided == 5,
			"granted", granted, want, "refused", refused, last, decided, "decisions")
		for _, p := range points["idle"] {
			limitertest.That(t, !p.Known, "of an idle policy there is", p)
		}
		time.Sleep(usage.HistorySpan + 3*time.Hour)
		keys, _ := client.Keys(t.Context(), "*:h:*").Result()
		limitertest.That(t, len(keys) == 0, "kept", keys)
	})
}
