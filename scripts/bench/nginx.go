package main

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"sync/atomic"
	"time"

	"github.com/sluice-go/sluice/internal/servers"
	"github.com/sluice-go/sluice/throttle"
)

// nginx measures how much of nginx's own limits Sluice uses when nginx must refuse nothing.
// The policies allow for jitter: of 200 ms, in the burst, and of 10 ms, by a margin.
func nginx(ctx context.Context, o scenarioOptions) ([]figure, error) {
	if _, err := exec.LookPath("nginx"); err != nil {
		o.say("left out: nginx is not installed; scripts/test installs it")
		return nil, nil
	}
	two, err := throughNginx(ctx, o, "two limits", o.of(1000, 3000), 0.95,
		[]servers.Zone{{Rate: 100, Burst: 40}, {Rate: 80, Burst: 300}},
		gcra("fast", 100, 40+1-20, 0), gcra("slow", 80, 300+1-16, 0))
	if err != nil {
		return nil, err
	}
	burst, err := throughNginx(ctx, o, "burst", o.of(1000, 3000), 0.95,
		[]servers.Zone{{Rate: 150, Burst: 60}}, gcra("burst", 150, 60+1-30, 0))
	if err != nil {
		return nil, err
	}
	none, err := throughNginx(ctx, o, "no burst", o.of(40, 400), 0.9,
		[]servers.Zone{{Rate: 5}}, gcra("spaced", 5, 1, 50*time.Millisecond))
	return append(append(two, burst...), none...), err
}

func gcra(name string, limit, burst int64, margin time.Duration) throttle.Window {
	w := shared(name, limit, time.Second)
	w.Algorithm, w.Burst, w.Margin = throttle.GCRA, burst, margin
	return w
}

func throughNginx(ctx context.Context, o scenarioOptions, name string, n int, bar float64, zones []servers.Zone, windows ...throttle.Window) ([]figure, error) {
	far := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer far.Close()
	dir, err := os.MkdirTemp("", "sluice-bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	proxy, err := servers.StartNginx(dir, far.Listener.Addr().String(), zones...)
	if err != nil {
		return nil, err
	}
	defer proxy.Stop()
	f, err := newFleet(o, windows...)
	if err != nil {
		return nil, err
	}
	defer f.close()

	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}
	defer client.CloseIdleConnections()
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
	c, err := f.planner()
	if err != nil {
		return nil, err
	}
	if err := f.start(); err != nil {
		return nil, err
	}
	if err := f.join(ctx, c, "acme", n, 8); err != nil {
		return nil, err
	}
	if err := f.await(ctx, n); err != nil {
		return nil, err
	}
	f.stop() // which waits for the last calls
	ideal := 0.0
	for _, z := range zones {
		ideal = max(ideal, float64(n-1-z.Burst)/float64(z.Rate))
	}
	granted := f.grants()
	took := granted[len(granted)-1].granted.Sub(granted[0].granted)
	return []figure{
		{Name: name + ": answers", Value: float64(answered.Load()), AtLeast: new(float64(n))},
		{Name: name + ": refused", Value: float64(refused.Load()), AtMost: new(0.)},
		{Name: name + ": utilization", Value: ideal / took.Seconds(), AtLeast: new(bar)},
	}, nil
}
