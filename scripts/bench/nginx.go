package main

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"sync/atomic"
	"time"

	"github.com/sluice-go/sluice/internal/servers"
	"github.com/sluice-go/sluice/throttle"
)

// nginx measures how much of nginx's own limits Sluice uses when nginx must refuse nothing.
// The policies allow for jitter: of 200 ms, in the burst, and of 10 ms, by a margin.
func nginx(ctx context.Context, o scenarioOptions) []figure {
	if _, err := exec.LookPath("nginx"); err != nil {
		o.say("left out: nginx is not installed; scripts/test installs it")
		return nil
	}
	two := throughNginx(ctx, o, "two limits", o.of(1000, 3000), 0.95,
		[]servers.Zone{{Rate: 100, Burst: 40}, {Rate: 80, Burst: 300}},
		gcra("fast", 100, 40+1-20, 0), gcra("slow", 80, 300+1-16, 0))
	burst := throughNginx(ctx, o, "burst", o.of(1000, 3000), 0.95,
		[]servers.Zone{{Rate: 150, Burst: 60}}, gcra("burst", 150, 60+1-30, 0))
	none := throughNginx(ctx, o, "no burst", o.of(40, 400), 0.9,
		[]servers.Zone{{Rate: 5}}, gcra("spaced", 5, 1, 50*time.Millisecond))
	return slices.Concat(two, burst, none)
}

func gcra(name string, limit, burst int64, margin time.Duration) throttle.Window {
	w := shared(name, limit, time.Second)
	w.Algorithm, w.Burst, w.Margin = throttle.GCRA, burst, margin
	return w
}

func throughNginx(
	ctx context.Context, o scenarioOptions, name string, n int, bar float64,
	zones []servers.Zone, windows ...throttle.Window,
) (figures []figure) {
	check(o.apart(func(o scenarioOptions) {
		far := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		o.atEnd(far.Close)
		dir := must(os.MkdirTemp("", "sluice-bench-"))
		o.atEnd(func() { os.RemoveAll(dir) })
		proxy := must(servers.StartNginx(dir, far.Listener.Addr().String(), zones...))
		o.atEnd(proxy.Stop)
		f := newFleet(o, windows...)

		client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}
		o.atEnd(client.CloseIdleConnections)
		var answered, refused atomic.Int64
		f.call = func() {
			resp, err := client.Get("http://" + proxy.Addr)
			if err != nil {
				return
			}
			defer resp.Body.Close()
			io.Copy(io.Discard, resp.Body)
			answered.Add(1)
			if resp.StatusCode != http.StatusOK {
				refused.Add(1)
			}
		}
		c := f.planner()
		f.start()
		f.join(ctx, c, "acme", n, 8)
		f.await(ctx, n)
		f.shift.end() // which waits for the last calls
		ideal := 0.0
		for _, z := range zones {
			ideal = max(ideal, float64(n-1-z.Burst)/float64(z.Rate))
		}
		figures = []figure{
			{Name: name + ": answers", Value: float64(answered.Load()), AtLeast: new(float64(n))},
			{Name: name + ": refused", Value: float64(refused.Load()), AtMost: new(0.)},
			{Name: name + ": utilization", Value: ideal / took(f.grants()), AtLeast: new(bar)},
		}
	}))
	return figures
}
