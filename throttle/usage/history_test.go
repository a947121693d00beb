package usage_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-go/sluice/throttle"
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
		if err != nil {
			t.Fatal(err)
		}
		stop := counter.Start(limiter)
		for i := range 5 {
			r := throttle.Request{Policy: "p", Tenant: "acme", Ticket: throttle.Ticket{Queue: "q", ID: fmt.Sprint(i)}}
			d, err := limiter.Reserve(t.Context(), r)
			if err != nil {
				t.Fatal(err)
			}
			if i == 0 {
				if _, err := d.Reservation.Pause(t.Context(), time.Second, ""); err != nil {
					t.Fatal(err)
				}
				time.Sleep(2 * time.Second)
			}
		}
		time.Sleep(3 * time.Minute)
		stop()
		points, err := usage.History(t.Context(), limiter, []string{"p", "idle"}, time.Now().Add(-time.Hour))
		if err != nil {
			t.Fatal(err)
		}
		var granted, refused int64
		for _, p := range points["p"] {
			granted, refused = granted+p.Granted, refused+p.Refused
		}
		if last := points["p"][len(points["p"])-1]; granted != want || want == 0 || refused != 1 || last.Waiting != 5-want || decided != 5 {
			t.Errorf("granted %d of %d, refused %d, %+v, %d decisions", granted, want, refused, last, decided)
		}
		for _, p := range points["idle"] {
			if p.Known {
				t.Errorf("of an idle policy there is %+v", p)
			}
		}
		time.Sleep(usage.HistorySpan + 3*time.Hour)
		if keys, _ := client.Keys(t.Context(), "*:h:*").Result(); len(keys) > 0 {
			t.Errorf("kept: %q", keys)
		}
	})
}
