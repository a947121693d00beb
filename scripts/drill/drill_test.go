//go:build drill

package drill

import (
	"fmt"
	"html"
	"io"
	"log/slog"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/worker/page"
)

// A drillStep is a step of the drill, and what the page has to tell of it. For metrics and alerts see scripts/alerts.
type drillStep struct {
	name  string
	lasts time.Duration // at least, in the full drill; the brief one goes on when the page tells it
	do    func(d *drill)
	page  map[string]string // by path, regular expressions of its text, joined by " & "
}

// size is how large the full drill is, or the brief one.
type size struct {
	tasks, mail, poison int // of each of five tenants; of one
	retryAfter, cut     time.Duration
}

const poisoner = `<script>alert("poison")</script>`

var (
	fleet    = setup{API: "some", Limit: 20, Queues: map[string]int{"default": 1, "bulk": 1}}
	five     = []string{"acme", "beta", "zeta", "small", `"><img src=x onerror=alert(1)>`}
	saysDown = map[string]string{"": "Redis does not answer & No task is lost", "?policy=api": "Redis does not answer"}
)

var steps = []drillStep{{
	name: "5,000 tasks of five tenants come", lasts: 30 * s,
	do: func(d *drill) {
		for _, tenant := range five {
			d.enqueue(d.size.tasks, tenant, "default")
		}
	},
	page: map[string]string{
		"": "Nothing needs you & Workers 3 & api Saturated", "?policy=api": regexp.QuoteMeta(five[4]),
	},
}, {
	name: "Redis is stopped for 27 s", lasts: 27 * s,
	do:   func(d *drill) { d.stopRedis() },
	page: saysDown,
}, {
	name: "Redis is back", lasts: 33 * s,
	do:   func(d *drill) { d.startRedis() },
	page: map[string]string{"": "api Saturated"},
}, {
	name: "a worker is killed", lasts: 30 * s,
	do: func(d *drill) { d.workers[2].kill() },
}, {
	name: "the API answers 429 with Retry-After 60", lasts: 75 * s,
	do: func(d *drill) { d.refuse <- fmt.Sprintf("%.0f", d.size.retryAfter.Seconds()) },
	page: map[string]string{
		"": `api Paused until \S+ by the upstream & refused to`, "?policy=api": `Paused until \S+ by the upstream`,
	},
}, {
	name: "a limit is cut to a tenth", lasts: 75 * s,
	do: func(d *drill) { d.act("what", "limit", "window", "provider", "limit", "2", "for", d.size.cut.String()) },
	page: map[string]string{
		"":            `Provider 2 until & provider \d+ of 2 in 1s & on-call : the drill`,
		"?policy=api": `\d+ of 2 in 1s`,
	},
}, {
	name: "Redis hangs for 44 s", lasts: 44 * s,
	do:   func(d *drill) { _ = d.redis.Process.Signal(syscall.SIGSTOP) },
	page: saysDown,
}, {
	name: "Redis goes on", lasts: 36 * s,
	do:   func(d *drill) { _ = d.redis.Process.Signal(syscall.SIGCONT) },
	page: map[string]string{"": "api (Saturated|Waiting|Flowing)"},
}, {
	name: "a policy is removed, for which tasks wait", lasts: 40 * s,
	do: func(d *drill) {
		d.enqueueAs("mail:send", d.size.mail, "beta", "default")
		d.publish(d.policies()[:1])
	},
	page: map[string]string{"": "mail Removed: what waits goes on by its last windows", "?policy=mail": "sender"},
}, {
	name: "a queue is paused", lasts: 150 * s,
	do: func(d *drill) {
		d.must(d.inspector.PauseQueue("bulk"))
		d.enqueue(50, "acme", "bulk")
	},
	page: map[string]string{"": "api Queue paused: bulk, by asynq’s tools"},
}, {
	name: "the queue goes on", lasts: 20 * s,
	do: func(d *drill) { d.must(d.inspector.UnpauseQueue("bulk")) },
}, {
	name: "50,000 poison tasks of one tenant come", lasts: 30 * s,
	do:   func(d *drill) { d.enqueueAs("api:poison", d.size.poison, poisoner, "default") },
	page: map[string]string{"?policy=api": regexp.QuoteMeta(poisoner), "": "Nothing needs you"},
}, {
	name: "they fail and come again", lasts: 150 * s,
	page: map[string]string{"": "Nothing needs you", "?policy=api&tenant=" + url.QueryEscape(poisoner): "Delayed by window provider"},
}, {
	name: "they are dropped", lasts: 80 * s,
	do: func(d *drill) {
		d.act("what", "drop", "tenant", url.QueryEscape(poisoner), "then", "delete", "sure", poisoner)
	},
	page: map[string]string{"": "drop .* on-call the drill"},
}, {
	name: "Redis is stopped for 5 minutes", lasts: 5 * minute,
	do:   func(d *drill) { d.calm.Store(true); d.stopRedis() },
	page: saysDown,
}, {
	name: "all is well", lasts: 170 * s,
	do:   func(d *drill) { d.startRedis() },
	page: map[string]string{"": "Nothing needs you & Waiting 0 & Workers 2 & No override, and no pause"},
}}

// playSteps plays the steps, and checks what the page tells. In the end every task has run.
func playSteps(d *drill, full bool) {
	d.size = size{tasks: 30, mail: 6, poison: 300, retryAfter: 4 * s, cut: 6 * s}
	if full {
		d.size = size{tasks: 1000, mail: 60, poison: 50_000, retryAfter: minute, cut: minute}
	}
	d.openPage()
	defer d.calm.Store(true)
	d.steadily(0, time.Hour, func() {
		for _, tenant := range five {
			go d.enqueue(1, tenant, "default")
		}
	})
	for _, step := range steps {
		d.Logf("%v: %s", time.Since(d.begun).Round(s/10), step.name)
		d.mu.Lock()
		d.recording = append(d.recording, scrape{at: time.Now(), instance: step.name})
		d.mu.Unlock()
		if step.do != nil {
			step.do(d)
		}
		end := time.Now().Add(time.Minute)
		if full {
			end = time.Now().Add(step.lasts)
		}
		missing, seen := []string{""}, map[string]bool{}
		for len(missing) > 0 && time.Now().Before(end) {
			time.Sleep(200 * time.Millisecond)
			missing = d.missing(step, seen)
		}
		if len(missing) > 0 {
			d.Errorf("%s, but\n%s", step.name, strings.Join(missing, "\n"))
		}
		if full {
			time.Sleep(time.Until(end))
		}
	}
	logged := []string{"asynq's Redis is unavailable"}
	if full { // of the stops of 27 s and of five minutes
		logged = append(logged, `asynq's Redis is still unavailable" for=4m`, `available again" after=2`, `available again" after=(4m5|5m)`)
	}
	for _, p := range d.workers[:2] { // the third one was killed
		text, err := os.ReadFile(p.log)
		d.must(err)
		for _, want := range logged {
			if !regexp.MustCompile(want).Match(text) {
				d.Errorf("%s has not logged %q", p.name, want)
			}
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for id := range d.enqueued {
		if d.called[id] == 0 {
			d.Errorf("task %s never ran", id)
		}
	}
	d.Logf("%d tasks, %d were called", len(d.enqueued), len(d.called))
}

// missing returns what the page has not told of a step yet.
func (d *drill) missing(step drillStep, seen map[string]bool) (all []string) {
	for path, wants := range step.page {
		text := d.page(path)
		for want := range strings.SplitSeq(wants, " & ") {
			what := fmt.Sprintf("the page %q does not say %q", path, want)
			if seen[what] = seen[what] || regexp.MustCompile(want).MatchString(text); !seen[what] {
				all = append(all, what+":\n"+text)
			}
		}
	}
	return all
}

// serveAPI serves the API that handlers call. It notes the IDs of tasks, and refuses a call when it is told to.
func (d *drill) serveAPI() (url string) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case after := <-d.refuse:
			w.Header().Set("Retry-After", after)
			w.WriteHeader(http.StatusTooManyRequests)
		default:
			d.mu.Lock()
			defer d.mu.Unlock()
			d.called[strings.TrimPrefix(r.URL.Path, "/")]++
		}
	}))
	d.Cleanup(server.Close)
	return server.URL
}

const token = "a token of 24 characters"

func (d *drill) publish(policies []throttle.Policy) {
	state, err := d.store.State(d.Context())
	d.must(err)
	_, err = d.store.Publish(d.Context(), policies, state.Version, control.Author{Who: "ci", Why: "the drill"})
	d.must(err)
}

// openPage publishes the policies, and serves a page to which an operator signs in.
func (d *drill) openPage() {
	d.publish(d.policies())
	opt := asynq.RedisClientOpt{Addr: d.Redis}
	d.inspector = asynq.NewInspector(opt)
	d.Cleanup(func() { d.inspector.Close() })
	p, err := page.New(page.Config{
		Client: d.client, Control: d.store, Inspector: d.inspector, Limiter: d.limiter, Token: token,
		Logger: slog.New(slog.DiscardHandler),
	})
	d.must(err)
	server := httptest.NewServer(p)
	d.Cleanup(server.Close)
	jar, _ := cookiejar.New(nil)
	d.browser, d.url = http.Client{Jar: jar}, server.URL+"/"
	d.post("sign-in", url.Values{"token": {token}, "who": {"on-call"}})
}

var tags, spaces = regexp.MustCompile(`<[^>]*>`), regexp.MustCompile(`\s+`)

// text reads an answer of the page as people do.
func (d *drill) text(resp *http.Response, err error) (text, source string) {
	d.must(err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	d.must(err)
	return html.UnescapeString(spaces.ReplaceAllString(tags.ReplaceAllString(string(body), " "), " ")), string(body)
}

// page returns the text of a page. However Redis is, it comes in time.
func (d *drill) page(path string) string {
	defer d.inTime(path, time.Now())
	text, _ := d.text(d.browser.Get(d.url + path))
	return text
}

func (d *drill) post(path string, form url.Values) string {
	defer d.inTime(path, time.Now())
	text, _ := d.text(d.browser.PostForm(d.url+path, form))
	return text
}

func (d *drill) inTime(path string, begun time.Time) {
	if took := time.Since(begun); took > 10*s { // 2 s, but for load
		d.Errorf("the page %q took %v", path, took)
	}
}

// act does what an operator does on the page of the policy, with its form.
func (d *drill) act(pairs ...string) {
	_, source := d.text(d.browser.Get(d.url + "?policy=api"))
	_, csrf, _ := strings.Cut(source, `name="csrf" value="`)
	csrf, _, _ = strings.Cut(csrf, `"`)
	state, err := d.store.State(d.Context())
	d.must(err)
	form := url.Values{
		"csrf": {csrf}, "policy": {"api"}, "why": {"the drill"}, "sure": {"yes"}, "version": {fmt.Sprint(state.Version)},
	}
	for i := 0; i < len(pairs); i += 2 {
		form.Set(pairs[i], pairs[i+1])
	}
	if text := d.post("change", form); strings.Contains(text, "Nothing has changed") {
		d.Error(text)
	}
}

// The brief drill: all of its steps, and outages of seconds.
func TestTheDrill(t *testing.T) {
	t.Parallel()
	playSteps(newDrill(t, fleet, 300*time.Millisecond), false)
}

func (d *drill) must(err error) {
	d.Helper()
	if err != nil {
		d.Fatal(err)
	}
}
