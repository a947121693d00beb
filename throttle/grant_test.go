package throttle_test

import (
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// The short way stores and answers what the long way does, to the byte, except for the order of sections.
func TestGrantIsReserve(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		rapid.Check(t, func(t *rapid.T) {
			if err := client.FlushAll(t.Context()).Err(); err != nil {
				t.Fatal(err)
			}
			var windows []throttle.Window
			for i := range rapid.IntRange(1, 4).Draw(t, "windows") {
				w := throttle.Window{
					Algorithm: rapid.SampledFrom([]throttle.Algorithm{throttle.Sliding, throttle.Sliding, throttle.Fixed, throttle.GCRA}).Draw(t, "algorithm"),
					Limit:     rapid.Int64Range(1, 9).Draw(t, "limit"),
					Name:      "w" + string(rune('0'+i)),
					Per:       rapid.SampledFrom([][]string{{"tenant"}, {}, {"tenant", "user"}}).Draw(t, "per"),
					Period:    rapid.SampledFrom([]time.Duration{s, 3 * s, 10 * s, m}).Draw(t, "period"),
					Unit:      rapid.SampledFrom([]string{"requests", "requests", "tokens"}).Draw(t, "unit"),
				}
				if rapid.Bool().Draw(t, "margin") {
					w.Margin = w.Period / 4
				}
				if w.Algorithm == throttle.Fixed && rapid.Bool().Draw(t, "first use") {
					w.Anchor = throttle.AnchorFirstUse
				}
				windows = append(windows, w)
			}
			p, q := policy(windows...), policy(windows...)
			q.Name = "q"
			fast, c := newHanded(t, client, p)
			slow := newLimiter(t, client, q)
			hand(t, slow, c)
			slow.WithoutGrant()
			now := time.Duration(0)
			var made []throttle.Reservation
			t.Repeat(map[string]func(*rapid.T){
				"": func(t *rapid.T) {
					all := dump(t, client)
					mine, theirs := map[string]string{}, map[string]string{}
					for key, value := range all {
						if rest, ok := strings.CutPrefix(key, "sluice:{p"); ok {
							mine[rest] = sorted(value)
						} else {
							theirs[strings.TrimPrefix(key, "sluice:{q")] = sorted(value)
						}
					}
					if !maps.Equal(mine, theirs) {
						t.Fatalf("stored\n%q\nwant\n%q", mine, theirs)
					}
				},
				"pass": func(t *rapid.T) {
					now += time.Duration(rapid.Int64Range(0, int64(4*s)).Draw(t, "by")).Truncate(us)
					c.set(now)
				},
				"reserve": func(t *rapid.T) {
					r := throttle.Request{
						Attributes: map[string]string{"user": rapid.SampledFrom([]string{"ann", "bob"}).Draw(t, "user")},
						Cost:       map[string]int64{"requests": rapid.Int64Range(0, 3).Draw(t, "cost")},
						Nonce:      rapid.StringMatching(`[a-z]{8}`).Draw(t, "nonce"), Policy: "p", Tenant: "acme",
					}
					for _, w := range windows {
						if w.Unit == "tokens" {
							r.Cost["tokens"] = rapid.Int64Range(0, 2).Draw(t, "tokens")
						}
					}
					got, errGot := fast.Reserve(t.Context(), r)
					r.Policy = "q"
					want, errWant := slow.Reserve(t.Context(), r)
					if (errGot == nil) != (errWant == nil) {
						t.Fatalf("%v, want %v", errGot, errWant)
					}
					if got.Granted {
						made = append(made, got.Reservation)
					}
					got.Policy, got.Reservation.Policy = want.Policy, want.Reservation.Policy
					if !reflect.DeepEqual(got, want) {
						t.Fatalf("got\n%+v\nwant\n%+v", got, want)
					}
				},
				"cancel": func(t *rapid.T) {
					if len(made) == 0 {
						t.Skip("nothing")
					}
					r := made[rapid.IntRange(0, len(made)-1).Draw(t, "which")]
					cancel(t, fast, r)
					r.Policy = "q"
					cancel(t, slow, r)
				},
			})
		})
	})
}

// sorted brings the sections of a scope's value (lua/state.lua) in the order of their names.
func sorted(value string) string {
	if len(value) < 8 || value[0] != 1 {
		return value
	}
	var sections []string
	for rest := value[8:]; rest != ""; {
		head := int(rest[0]) + 12
		size := int(rest[head-3])<<16 + int(rest[head-2])<<8 + int(rest[head-1])
		sections = append(sections, rest[:head+size])
		rest = rest[head+size:]
	}
	slices.Sort(sections)
	return value[:8] + strings.Join(sections, "")
}
