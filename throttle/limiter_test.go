package throttle_test

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// The problem that started Sluice: 20 a minute and 5 per 3 seconds on one endpoint.
func TestTwoWindowsOneReservation(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l, err := throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{{
			Name: "auth.createToken",
			Windows: []throttle.Window{
				{Name: "per-minute", Limit: 20, Period: time.Minute},
				{Name: "burst", Limit: 5, Period: 3 * time.Second},
			},
		}}})
		if err != nil {
			t.Fatal(err)
		}
		now := int64(1_800_000_000_000_000)
		l.SetNow(func() int64 { return now })
		for i := range 8 {
			d, err := l.Reserve(context.Background(), throttle.Request{Policy: "auth.createToken", Tenant: "acme"})
			if err != nil {
				t.Fatal(err)
			}
			t.Log(i, d.Granted, d.RetryIn, d.Windows[0].Remaining, d.Windows[1].Remaining, d.Reason())
		}
	})
}
