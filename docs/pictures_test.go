package docs_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

var draw = flag.Bool("draw", false, "write the pictures of docs anew")

// A track is one window, and when it granted calls while callers asked all the time.
type track struct {
	says   string
	window throttle.Window
	holds  time.Duration // how long each call takes; 0: no time
	grants []time.Duration
}

const (
	trackFor  = 30 * time.Second
	trackStep = 250 * time.Millisecond
	busyAfter = 4 * time.Second // before, nobody asks
)

// The picture shows what windows let through, by the windows themselves on fake time. A test holds
// that it is up to date: go test -run TestThePictureOfWindows ./docs -draw
func TestThePictureOfWindows(t *testing.T) {
	tracks := []*track{
		{says: "sliding, 10 per 10 s", window: throttle.Window{Limit: 10, Period: 10 * time.Second}},
		{says: "fixed, 10 per 10 s", window: throttle.Window{
			Algorithm: throttle.AlgorithmFixed, Limit: 10, Period: 10 * time.Second}},
		{says: "gcra, 10 per 10 s, burst 3", window: throttle.Window{
			Algorithm: throttle.AlgorithmGCRA, Limit: 10, Period: 10 * time.Second, Burst: 3}},
		{says: "gcra, 10 per 10 s, burst 1", window: throttle.Window{
			Algorithm: throttle.AlgorithmGCRA, Limit: 10, Period: 10 * time.Second, Burst: 1}},
		{says: "concurrency, 2 at once, calls of 3 s", holds: 3 * time.Second, window: throttle.Window{
			Algorithm: throttle.AlgorithmConcurrency, Limit: 2}},
	}
	for _, tr := range tracks {
		synctest.Test(t, tr.run)
	}
	upToDate(t, filepath.Join("howto", "choose.svg"), picture(tracks))
}

// The picture shows when tickets of three queues start that share 20 per 3 s by their priorities, by a
// line on fake time: go test -run TestThePictureOfPriorities ./docs -draw
func TestThePictureOfPriorities(t *testing.T) {
	queues := map[string]int{"critical": 6, "default": 3, "low": 1}
	of := map[string]*track{}
	var tracks []*track
	for _, queue := range []string{"critical", "default", "low"} {
		of[queue] = &track{says: fmt.Sprintf("%s, priority %d", queue, queues[queue])}
		tracks = append(tracks, of[queue])
	}
	synctest.Test(t, func(t *testing.T) {
		shared := throttle.Window{Name: "w", Limit: 20, Period: 3 * time.Second, Shared: true}
		line := throttletest.NewLimiter(t, throttle.Policy{Name: "p", Windows: []throttle.Window{shared}}).Line("p")
		var requests []throttle.Request
		for queue := range queues {
			for i := range 150 {
				ticket := throttle.Ticket{Queue: queue, ID: fmt.Sprint(i)}
				requests = append(requests, throttle.Request{Policy: "p", Tenant: "acme", Ticket: ticket})
			}
		}
		expect.Must(t, expect.ErrOf(line.Join(t.Context(), requests)))
		for begin := time.Now(); time.Since(begin) < trackFor-2*time.Second; time.Sleep(trackStep) {
			taken := expect.Got(line.Take(t.Context(), throttle.TakeOptions{Queues: queues, Max: throttle.MaxTake}))(t)
			for _, ticket := range taken.Tickets {
				tr := of[ticket.Queue]
				tr.grants = append(tr.grants, time.Since(begin)+time.Second)
			}
		}
	})
	upToDate(t, filepath.Join("explanation", "line.svg"), picture(tracks))
}

// upToDate compares a picture with its file.
func upToDate(t *testing.T, path, want string) {
	t.Helper()
	if *draw {
		expect.Must(t, os.WriteFile(path, []byte(want), 0o644))
	}
	got, err := os.ReadFile(path)
	expect.That(t, err == nil && string(got) == want, path, "is not what is drawn now", err, "run this test with -draw")
}

// run asks for more than the window ever grants.
func (tr *track) run(t *testing.T) {
	tr.window.Name, tr.window.Shared = "w", true
	limiter := throttletest.NewLimiter(t, throttle.Policy{Name: "p", Windows: []throttle.Window{tr.window}})
	ctx := context.Background()
	// Buckets by the clock begin at the full ten seconds.
	time.Sleep(time.Until(time.Now().Truncate(10 * time.Second).Add(10 * time.Second)))
	begin := time.Now()
	time.Sleep(busyAfter)
	for ; time.Since(begin) < trackFor; time.Sleep(trackStep) {
		for {
			d := expect.Got(limiter.Reserve(ctx, throttle.Request{Policy: "p"}))(t)
			if !d.Granted {
				break
			}
			tr.grants = append(tr.grants, time.Since(begin).Round(trackStep))
			if tr.holds > 0 {
				time.AfterFunc(tr.holds-trackStep/2, func() { d.Reservation.Release(ctx) })
			}
		}
	}
	time.Sleep(tr.holds)
}

// picture draws a row for each window, with a dot for each grant: those of one moment are stacked.
func picture(tracks []*track) string {
	const (
		left, width, row = 12, 700, 92
		dot              = 3.2
	)
	x := func(at time.Duration) float64 { return left + float64(at)/float64(trackFor)*(width-2*left) }
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="system-ui, sans-serif" font-size="13">
<style>text{fill:#24292f}.axis{stroke:#d0d7de}circle{fill:#0969da}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.axis{stroke:#444c56}circle{fill:#58a6ff}}</style>
`, width, row*len(tracks)+26)
	for i, tr := range tracks {
		base := float64(row*i + row - 8)
		fmt.Fprintf(&b, "<text x=\"%d\" y=\"%.0f\">%s</text>\n", left, base-row+24, tr.says)
		for s := time.Duration(0); s <= trackFor; s += 10 * time.Second {
			fmt.Fprintf(&b, "<line class=\"axis\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.0f\" y2=\"%.0f\"/>\n", x(s), x(s), base-52, base)
		}
		fmt.Fprintf(&b, "<line class=\"axis\" x1=\"%d\" x2=\"%d\" y1=\"%.0f\" y2=\"%.0f\"/>\n", left, width-left, base, base)
		stacked := map[time.Duration]int{}
		for _, at := range tr.grants {
			fmt.Fprintf(&b, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"%.1f\"/>\n", x(at), base-4-5.2*float64(stacked[at]), dot/1.3)
			stacked[at]++
		}
	}
	for s := time.Duration(0); s <= trackFor; s += 10 * time.Second {
		fmt.Fprintf(&b, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%.0f s</text>\n", x(s), row*len(tracks)+16, s.Seconds())
	}
	b.WriteString("</svg>\n")
	return b.String()
}
