package page_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/throttle/usage"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/page"
)

func TestMain(m *testing.M) {
	logging.Disable() // a Redis ends on purpose here
	os.Exit(m.Run())
}

const token = "a token of 24 characters"

// hostile is a tenant that would do harm.
const hostile = `"><script>document.title='harmed'</script><img src=x onerror="document.title='harmed'">` + "\r\ndata: x\u202e"

// A pageServer serves a page, with what it shows.
type pageServer struct {
	testing.TB
	control *control.Store
	limiter *throttle.Limiter
	url     string
}

// newPageServer returns a page on a Redis where tasks of acme wait and a hostile tenant's do.
func newPageServer(t testing.TB, client *redis.Client, change ...func(*page.Config)) *pageServer {
	t.Helper()
	windows := []throttle.Window{
		{Name: "minute", Limit: 2, Period: time.Minute},
		{Name: "account", Limit: 5000, Period: time.Hour, Shared: true},
	}
	limiter := expect.Got(throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{
		{Name: "github", Match: []string{"github:*"}, Windows: windows}, {Name: "idle", Windows: windows},
	}}))(t)
	counter := usage.New() // in a process with other windows
	other := throttle.Policy{Name: "github", Windows: []throttle.Window{{Name: "other", Limit: 1e6, Period: time.Hour}}}
	config := throttle.Config{Client: client, Observer: counter.Observe, Policies: []throttle.Policy{other}}
	granting := expect.Got(throttle.New(config))(t)
	for tenant, n := range map[string]int64{"globex": 1200, hostile: 400} {
		r := throttle.Request{Cost: map[string]int64{throttle.Requests: n}, Policy: "github", Tenant: tenant}
		expect.Must(t, expect.ErrOf(granting.Reserve(t.Context(), r)))
	}
	counter.Start(granting)()
	opt := asynq.RedisClientOpt{Addr: client.Options().Addr}
	enqueuer := expect.Got(worker.NewClient(opt, worker.ClientConfig{Limiter: limiter, LimiterTimeout: time.Minute}))(t)
	t.Cleanup(func() { enqueuer.Close() })
	for _, tenant := range []string{"acme", hostile} {
		for i := range 5 {
			task := worker.NewTask(worker.Identity{Tenant: tenant}, "github:star", nil)
			id := asynq.TaskID(fmt.Sprintf("%.4s-%d", tenant, i))
			expect.Must(t, expect.ErrOf(enqueuer.EnqueueContext(t.Context(), task, id)))
		}
	}
	store := control.StoreOf(limiter)
	inspector := asynq.NewInspector(opt)
	t.Cleanup(func() { inspector.Close() })
	c := page.Config{
		Asynqmon: "https://ops.example.com/asynqmon/", Client: enqueuer, Control: store, Inspector: inspector, Limiter: limiter,
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)), Token: token,
	}
	for _, f := range change {
		f(&c)
	}
	return &pageServer{TB: t, control: store, limiter: limiter, url: servePage(t, c)}
}

// servePage serves a page, and returns its address.
func servePage(t testing.TB, c page.Config) string {
	t.Helper()
	p := expect.Got(page.New(c))(t)
	mux := http.NewServeMux()
	mux.Handle("/sluice/", http.StripPrefix("/sluice", p))
	mux.Handle("/sluice", http.StripPrefix("/sluice", p))
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	t.Cleanup(server.CloseClientConnections) // of those that follow the page
	return server.URL + "/sluice/"
}

// pause pauses the policy, or one tenant of it.
func (s *pageServer) pause(ctx context.Context, tenant string) {
	s.Helper()
	expect.Must(s, s.control.Pause(ctx, "github", tenant, time.Hour, control.Author{Who: "bob", Why: "the API is down"}))
}

// A visitor is a browser without scripts.
type visitor struct {
	*pageServer
	http   http.Client
	origin string // of its forms
}

func (s *pageServer) visitor() *visitor {
	jar, _ := cookiejar.New(nil)
	return &visitor{pageServer: s, http: http.Client{Jar: jar}, origin: strings.TrimSuffix(s.url, "/sluice/")}
}

func (v *visitor) do(r *http.Request, status int) string {
	v.Helper()
	resp := expect.Got(v.http.Do(r))(v)
	defer resp.Body.Close()
	text := string(expect.Got(io.ReadAll(resp.Body))(v))
	if strings.Contains(text, "Redis does not answer. Nothing has changed.") { // in time, on a slow machine
		r.Body, _ = r.GetBody()
		return v.do(r, status)
	}
	expect.That(v, resp.StatusCode == status, r.Method, r.URL, resp.Status, "want", status, text)
	return text
}

func (v *visitor) get(path string) (text string) {
	v.Helper()
	r, _ := http.NewRequest("GET", v.url+path, nil)
	for i := 0; i == 0 || i < 8 && strings.Contains(text, "Redis does not answer"); i++ { // in time, on a slow machine
		time.Sleep(time.Duration(min(i, 1)) * time.Second) // an answer is shown for a second
		text = v.do(r, http.StatusOK)
	}
	return text
}

func (v *visitor) post(path string, status int, form url.Values) string {
	v.Helper()
	r, _ := http.NewRequest("POST", v.url+path, strings.NewReader(form.Encode()))
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	r.Header.Set("Origin", v.origin)
	return v.do(r, status)
}

// signIn returns what its forms must carry.
func (v *visitor) signIn() (csrf string) {
	v.Helper()
	v.post("sign-in", http.StatusOK, url.Values{"token": {token}, "who": {"anna"}})
	_, rest, _ := strings.Cut(v.get("?policy=github"), `name="csrf" value="`)
	csrf, _, _ = strings.Cut(rest, `"`)
	expect.Require(v, csrf != "", "no form of the page has a CSRF token")
	return csrf
}

func (v *visitor) wants(text string, wants ...string) {
	v.Helper()
	for _, want := range wants {
		expect.That(v, strings.Contains(text, want), want, "is missing in:", text)
	}
}

// each runs the test on real Redis and on miniredis.
func each(t *testing.T, test func(t *testing.T, client *redis.Client)) {
	t.Parallel()
	throttletest.Each(t, test)
}

// The page says which policies there are, who waits for them, since when, until when and for what.
func TestThePageSaysWhoWaitsAndWhy(t *testing.T) {
	each(t, func(t *testing.T, client *redis.Client) {
		s := newPageServer(t, client)
		v := s.visitor()
		v.wants(v.get(""), `<a href="./?policy=github">github</a>`, `data-l="Waiting" class="r"><b>10</b>`,
			"Saturated</b> by tenants’ own limits", "idle", "0 of 5,000 in 1h", "Nothing has been changed.", "Nothing needs you",
			`<dt>Workers</dt><dd class="act">0</dd><dd>none is there</dd>`)
		v.wants(v.get("?policy=github"), ">acme</bdi>", `data-l="Waiting" class="r">5<`, "50 %", "0 of 2 in 1m",
			`title="globex">globex</bdi></a></span><span class="n"><b>1,200</b> 75 %`, "Who waits")
		v.wants(v.get("?policy=idle"), "Nothing is recorded")
		text := v.get("?policy=github&like=globex")
		expect.That(t, !strings.Contains(text, `data-l="Waiting"`), "a filter lets others through:", text)
		v.wants(v.get("?policy=github&tenant=acme"), "<dt>Waiting</dt><dd>5</dd>", "<dt>Delayed by</dt><dd>minute</dd>",
			"<dt>Last starts</dt>", "0 of 2 in 1m")
		v.wants(v.get("?find=acme"), `<a href="./?policy=github&amp;tenant=acme"><bdi title="acme">acme</bdi></a> in`, "<b>5</b> waiting")
		v.wants(v.get("?find=GIT"), `Policy <a href="./?policy=github">github</a>`)
		v.wants(v.get("?find=acme-4"), "<bdi>acme-4</bdi>", "queue default", "github:star", "Starts in about", "Began to wait", "<b>minute</b> has room for it",
			"position 5", "of 5 of its tenant", "<dt>Delayed by</dt><dd>minute</dd>", "<b>Binds</b>",
			`<a href="https://ops.example.com/asynqmon/queues/default/tasks/acme-4">`)
		v.wants(v.get("queues/default/tasks/acme-4"), "<bdi>acme-4</bdi>", "queue default", "position 5")
		v.wants(v.get("?find=nobody"), "No task has this ID.")
		v.wants(v.get("?policy=none"), "Throttle: unknown policy &#34;none&#34;")
		var waiting []throttle.Request
		for _, queue := range []string{"0a/mail", "0a/slow", "0a/slow"} {
			ticket := throttle.Ticket{Queue: queue, ID: fmt.Sprint(len(waiting))}
			waiting = append(waiting, throttle.Request{Policy: "idle", Tenant: "initech", Ticket: ticket})
		}
		expect.Must(t, expect.ErrOf(s.limiter.Line("idle").Join(t.Context(), waiting)))
		v.wants(v.get("?policy=idle&tenant=initech"), "<dt>Waiting</dt><dd>3</dd>")
		v.wants(v.get("?policy=idle&like=initech"), "<small> mail · live</small>", "<small> slow · live</small>")
	})
}

// Processes that go by policies of their own are told beside the published version: without one they are no trouble.
func TestThePageSaysWhoRunsOtherPolicies(t *testing.T) {
	each(t, func(t *testing.T, client *redis.Client) {
		s := newPageServer(t, client)
		follow := func(limit int64) {
			policies := s.limiter.Policies()
			policies[0].Windows[0].Limit = limit
			l := expect.Got(throttle.New(throttle.Config{Client: client, Logger: slog.New(slog.DiscardHandler), Policies: policies}))(t)
			f := control.StoreOf(l).Follow(t.Context(), control.FollowConfig{KeepPolicies: true})
			t.Cleanup(func() { f.Close() })
		}
		follow(4)
		text := s.visitor().get("")
		expect.That(t, strings.Contains(text, "none published") && !strings.Contains(text, "of the processes"), text)
		published := s.limiter.Policies()
		published[0].Windows[0].Limit = 3
		expect.Must(t, expect.ErrOf(s.control.Publish(t.Context(), published, 0, control.Author{Who: "ada", Why: "test"})))
		follow(5)
		time.Sleep(1100 * time.Millisecond) // what was asked is kept for a second
		text = s.visitor().get("")
		expect.That(t, strings.Contains(text, "version 1") && strings.Count(text, "1 of the processes: its own policies ") == 2, "it does not name both", text)
	})
}

// What is data stays data, in the page and in its news.
func TestNamesAreOnlyText(t *testing.T) {
	t.Parallel()
	s := newPageServer(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()))
	v := s.visitor()
	csrf := v.signIn()
	text := url.QueryEscape(hostile)
	v.post("change", http.StatusOK, url.Values{
		"csrf": {csrf}, "what": {"override"}, "policy": {"github"}, "tenant": {text},
		"limit minute": {"3"}, "for": {"1h"}, "why": {hostile[:60]}, "sure": {"yes"}, "version": {"0"},
	})
	for _, path := range []string{
		"?policy=github", "?policy=github&tenant=" + text, "?find=" + text, "?policy=" + text,
		"?task=" + text + "&queue=" + text, "?done=" + text,
	} {
		_, text, _ := strings.Cut(v.get(path), "<main") // before it stands what was typed in
		expect.That(t, !strings.Contains(text, "<script>") && !strings.Contains(text, "<img") && !strings.ContainsAny(text, "\r\u202e"),
			path, "the tenant's name is in the page as it is", text)
	}
	v.wants(v.get("?policy=github&tenant="+url.QueryEscape(hostile)), "Minute 3", "<dt>Waiting</dt><dd>5</dd>")
}

// Whoever does not know the token changes nothing, nor does another site by the browser of one who does.
func TestOnlyOperatorsChangeSomething(t *testing.T) {
	t.Parallel()
	s := newPageServer(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()))
	pause := url.Values{"what": {"pause"}, "policy": {"github"}, "for": {"1h"}, "why": {"they asked"}, "sure": {"yes"}, "version": {"0"}}
	stranger := s.visitor()
	expect.That(t, !strings.Contains(stranger.get("?policy=github"), "csrf"), "a stranger is shown forms")
	stranger.post("change", http.StatusUnauthorized, pause)
	stranger.post("sign-in", http.StatusUnauthorized, url.Values{"token": {token[1:]}, "who": {"anna"}})
	stranger.post("sign-in", http.StatusUnprocessableEntity, url.Values{"token": {token}})

	anna := s.visitor()
	csrf := anna.signIn()
	anna.post("change", http.StatusForbidden, pause)
	pause.Set("csrf", s.visitor().signIn())
	anna.post("change", http.StatusForbidden, pause) // of another session
	pause.Set("csrf", csrf)
	anna.origin = "https://elsewhere.example.com"
	anna.post("change", http.StatusForbidden, pause)
	anna.origin = strings.TrimSuffix(s.url, "/sluice/")
	state, err := s.control.State(t.Context())
	expect.That(t, err == nil && len(state.Pauses) <= 0, "somebody paused it:", state.Pauses, err)

	anna.post("change", http.StatusOK, pause)
	anna.post("sign-out", http.StatusOK, nil)
	anna.post("change", http.StatusUnauthorized, pause)

	readOnly := newPageServer(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()), func(c *page.Config) { c.Token = "" }).visitor()
	readOnly.post("sign-in", http.StatusNotFound, url.Values{"token": {""}, "who": {"anna"}})
}

// An operator pauses, overrides, and takes both back. The page shows it, and who did it.
func TestOperatorsChangeLimits(t *testing.T) {
	each(t, func(t *testing.T, client *redis.Client) {
		s := newPageServer(t, client)
		v := s.visitor()
		csrf := v.signIn()
		version := ""
		change := func(status int, pairs ...string) string {
			t.Helper()
			form := url.Values{"csrf": {csrf}, "policy": {"github"}, "why": {"a test"}, "version": {version}}
			for i := 0; i < len(pairs); i += 2 {
				form.Set(pairs[i], pairs[i+1])
			}
			return v.post("change", status, form)
		}
		// sure sees first what an action would do.
		sure := func(would string, pairs ...string) string {
			t.Helper()
			text := change(200, pairs...)
			v.wants(text, "nothing has been done yet", would)
			_, rest, _ := strings.Cut(text, `name="version" value="`)
			version, _, _ = strings.Cut(rest, `"`)
			return change(200, append(pairs, "sure", "yes")...)
		}
		v.wants(sure("Nothing of github, all tenants, starts until ", "what", "pause", "for", "1h"),
			"The pause has begun.", "Paused until ", "by anna", "a test")
		v.wants(sure("acme: minute 50, weight 3 until ", "what", "override", "tenant", "acme", "limit minute", "50", "weight", "3", "for", "30m"),
			"The override is in force.", "Minute 50, weight 3")
		v.wants(change(http.StatusUnprocessableEntity, "what", "front", "whom", "acme", "for", "10m"), "has an override by")
		v.wants(sure("acme goes before other tenants until ", "what", "front", "whom", "acme", "for", "40m"), "The tenant goes first.")
		state, err := s.control.State(t.Context())
		expect.That(t, err == nil && len(state.Pauses) == 1 && len(state.Overrides) == 1 &&
			state.Overrides[0].Windows["minute"].Limit == 50 && state.Overrides[0].Weight == 1e6 &&
			state.Overrides[0].Author == "anna", "in force:", state.Interventions, err)
		v.wants(sure("ends now", "what", "resume"), "The pause has ended.")
		v.wants(sure("The override of github, tenant acme, ends now", "what", "clear", "tenant", "acme"), "The override has ended.")
		author := control.Author{Who: "ci", Why: "of another program"}
		expect.Must(t, s.control.Pause(t.Context(), "gone", "", 366*24*time.Hour, author))
		year := time.Now().UTC().AddDate(0, 0, 366).Format("Jan 2 2006")
		v.wants(change(200, "what", "pause", "for", "8784h"), "starts until "+year)
		sure("The pause of gone, all tenants, ends now", "what", "resume", "policy", "gone")
		v.wants(v.get(""), "No override, and no pause.")
		v.wants(sure("forget what they have counted for all tenants", "what", "reset"), "The windows were reset.")
		expect.Must(t, expect.ErrOf(s.control.Publish(t.Context(), s.limiter.Policies(), 0, control.Author{Who: "ci", Why: "first"})))
		v.wants(sure("github/account 5000/h -&gt; 6000/h, for all tenants, until it is changed again.", "what", "limit", "window", "account", "limit", "6000"), "The limit is set.")
		v.wants(sure("github/account 6000/h -&gt; 3000/h, for all tenants, until ", "what", "limit", "window", "account", "limit", "3000", "for", "2h"),
			"The limit is set.", "Account 3000", "End the override…")
		v.wants(change(200, "what", "limit", "window", "account", "limit", "7000"), "Still in force: account 3000 until ")
		v.wants(sure("The override of github, all tenants, ends now", "what", "clear"), "The override has ended.")
		version = "1" // of before
		v.wants(change(http.StatusUnprocessableEntity, "what", "limit", "window", "account", "limit", "7000", "sure", "yes"), "Nothing has changed.")
		state, err = s.control.State(t.Context())
		expect.That(t, err == nil && state.Policies[0].Windows[1].Limit == 6000, "published:", state.Policies, err)
		call := throttle.Request{Cost: map[string]int64{throttle.Requests: 2}, Policy: "github", Tenant: "acme"}
		go func() { // in place: they are not dropped. On a slow machine nobody asks for the tasks by then: one is granted
			for t.Context().Err() == nil {
				_, _ = s.limiter.Wait(t.Context(), call)
			}
		}()
		waits := func(n int) bool {
			return strings.Contains(v.get("?policy=github&tenant=acme"), fmt.Sprintf("<dt>Waiting</dt><dd>%d</dd>", n))
		}
		for !waits(6) {
		}
		drop := []string{"what", "drop", "tenant", "acme", "then", "archive"}
		v.wants(change(200, drop...), "5 waiting tasks of acme in github are archived", "Type the tenant’s name again")
		version = fmt.Sprint(state.Version)
		v.wants(change(200, append(drop, "sure", "yes")...), "nothing has been done yet") // that is not its name
		told := change(200, append(drop, "sure", "acme")...)                              // on a slow machine it goes on after the answer
		expect.That(t, strings.Contains(told, "The tasks were dropped.") || strings.Contains(told, "The drop is under way."), told)
		for !waits(1) && !waits(0) { // the call fits after a minute
		}
		for _, bad := range [][]string{
			{"what", "rob"},
			{"what", "drop"},
			{"what", "pause", "for", "soon"},
			{"what", "pause", "for", "1h", "why", ""},
			{"what", "pause", "for", "1h", "policy", "none"},
			{"what", "limit", "window", "none", "limit", "1"},
			{"what", "limit", "window", "account", "limit", "0"},
			{"what", "override", "tenant", "acme", "for", "1h"},
			{"what", "override", "tenant", "acme", "for", "1h", "limit minute", "many"},
			{"what", "override", "tenant", "acme", "for", "1h", "limit none", "5"},
			{"what", "override", "tenant", "acme", "for", "1h", "weight", "-1"},
		} {
			v.wants(change(http.StatusUnprocessableEntity, bad...), "Nothing has changed.")
		}
		changes, err := s.control.Changes(t.Context(), 100)
		dropped := slices.IndexFunc(changes, func(c control.Change) bool { return c.Kind == control.Dropped })
		expect.That(t, err == nil && len(changes) == 13, changes, err)
		expect.Equal(t, changes[dropped].Text, "archive 5 waiting tasks", "the change")
	})
}

// A removed policy for which somebody waits, and a queue that asynq's tools have paused, are told. The policy idle is
// gone.
func TestThePageSaysWhatWasRemovedAndPaused(t *testing.T) {
	each(t, func(t *testing.T, client *redis.Client) {
		s := newPageServer(t, client)
		inspector := asynq.NewInspector(asynq.RedisClientOpt{Addr: client.Options().Addr})
		defer inspector.Close()
		expect.Must(t, inspector.PauseQueue("default"))
		paused := "<b>Queue paused:</b> default, by asynq’s tools"
		for begun := time.Now(); !strings.Contains(s.visitor().get(""), paused); time.Sleep(100 * time.Millisecond) {
			expect.Require(t, time.Since(begun) <= time.Minute, "the page does not say so")
		}
		expect.Must(t, inspector.UnpauseQueue("default"))
		database := client.Get(t.Context(), "sluice:asynq").Val()
		taken := throttle.TakeOptions{Queues: map[string]int{database + "/default": 1}}
		expect.Must(t, expect.ErrOf(s.limiter.Line("github").Take(t.Context(), taken))) // a server asks
		former := s.limiter.Policies()
		former[0].Name, former[0].Match = "other", nil
		expect.Must(t, s.limiter.SetPolicies(former[:1]))
		time.Sleep(1100 * time.Millisecond) // what was asked is kept for a second
		v := s.visitor()
		text := v.get("")
		v.wants(text, "<b>Removed:</b> what waits goes on by its last windows")
		expect.That(t, !strings.Contains(text, "policy-idle"), "nobody waits for it:", text)
		for i := range 60 {
			p := former[0]
			p.Name = fmt.Sprint("a-", i)
			former = append(former, p)
		}
		expect.Must(t, s.limiter.SetPolicies(former[2:]))
		time.Sleep(1100 * time.Millisecond)
		v.wants(v.get(""), "None of these policies needs you")
	})
}

func TestABadConfigIsRefused(t *testing.T) {
	limiter := throttletest.NewLimiter(t)
	store := &control.Store{}
	for want, c := range map[string]page.Config{
		"Config.Limiter is nil":          {},
		`Config.Asynqmon "javascript:x"`: {Limiter: limiter, Asynqmon: "javascript:x"},
		"Config.Token has 3 bytes":       {Limiter: limiter, Control: store, Token: "abc"},
		"Config.Control is nil":          {Limiter: limiter, Token: token},
	} {
		_, err := page.New(c)
		expect.That(t, err != nil && strings.Contains(err.Error(), want), err, ", want", want)
	}
}

// A part of a name finds tenants however many wait, and a preview has the one that is changed.
func TestTheFilterLooksBeyondAPage(t *testing.T) {
	t.Parallel()
	s := newPageServer(t, redis.NewClient(&redis.Options{Addr: throttletest.Redis(t)}))
	var requests []throttle.Request
	for i := range 120 {
		requests = append(requests, throttle.Request{Policy: "idle", Tenant: fmt.Sprint("tenant-", i), Ticket: throttle.Ticket{Queue: "q", ID: fmt.Sprint(i)}})
	}
	expect.Must(t, expect.ErrOf(s.limiter.Line("idle").Join(t.Context(), requests)))
	for _, i := range []int{0, 77, 119} {
		s.visitor().wants(s.visitor().get(fmt.Sprintf("?policy=idle&like=nant-%d", i)), fmt.Sprintf(">tenant-%d</bdi>", i))
	}
	text := s.visitor().get("?policy=idle&like=nant-77")
	expect.That(t, !strings.Contains(text, ">tenant-78</bdi>"), "it shows another one:", text)
	v := s.visitor()
	first := url.Values{"csrf": {v.signIn()}, "what": {"front"}, "policy": {"idle"}, "whom": {"tenant-77"}, "for": {"10m"}, "why": {"a test"}}
	v.wants(v.post("change", http.StatusOK, first), `<th scope="row"><bdi>tenant-77</bdi></th>`) // the preview, of few
}

// While Redis does not answer, the page says so in time, and shows what was known.
func TestThePageSaysThatRedisDoesNotAnswer(t *testing.T) {
	t.Parallel()
	listener := expect.Got(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer listener.Close() // a Redis that hangs: nobody accepts
	server := throttletest.Miniredis(t)
	var hangs atomic.Bool
	client := redis.NewClient(&redis.Options{Addr: server.Addr(), Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
		if hangs.Load() {
			addr = listener.Addr().String()
		}
		return (&net.Dialer{}).DialContext(ctx, network, addr)
	}})
	t.Cleanup(func() { client.Close() })
	v := newPageServer(t, client).visitor()
	v.wants(v.get(""), "Nothing needs you", "No override, and no pause.")
	hangs.Store(true)
	server.Close() // of the connections that are open
	time.Sleep(1100 * time.Millisecond)
	for _, path := range []string{"", "?policy=github", "?find=acme-1"} {
		text := v.get(path) // in time: TestThePageWaitsForRedisInTime
		v.wants(text, "Redis does not answer", "No task is lost", "No policy says “fail_open: true”")
		expect.That(t, !strings.Contains(text, "No override, and no pause.") && !strings.Contains(text, "Nothing needs you"), path, "nobody knows that", text)
	}
	v.wants(v.get(""), `<b>10</b>`)
}

// Whoever follows the page gets its content at once, and again when it has changed.
func TestThePageIsLive(t *testing.T) {
	t.Parallel()
	s := newPageServer(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	r, _ := http.NewRequestWithContext(ctx, "GET", s.url+"live", nil)
	resp := expect.Got(http.DefaultClient.Do(r))(t)
	defer resp.Body.Close()
	expect.Equal(t, resp.Header.Get("Content-Type"), "text/event-stream")
	var text strings.Builder
	buffer := make([]byte, 64<<10)
	read := func(want string) {
		t.Helper()
		for !strings.Contains(text.String(), want) {
			n, err := resp.Body.Read(buffer)
			expect.Require(t, err == nil, err, "want", want, "in", text.String())
			text.Write(buffer[:n])
		}
	}
	read("data: <tr id=\"policy-github\">")
	read("\n\n")
	s.pause(ctx, "")
	read("Paused until ")
}

// The page loads nothing from elsewhere, and lets nobody frame it.
func TestThePageTrustsNobody(t *testing.T) {
	t.Parallel()
	s := newPageServer(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()))
	resp := expect.Got(http.Get(strings.TrimSuffix(s.url, "/")))(t)
	defer resp.Body.Close()
	expect.That(t, resp.Request.URL.Path == "/sluice/", "without a slash:", resp.Request.URL)
	policy := resp.Header.Get("Content-Security-Policy")
	for _, want := range []string{"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "form-action 'self'"} {
		expect.That(t, strings.Contains(policy, want) && !strings.Contains(policy, "unsafe"),
			want, "is missing in", policy)
	}
}
