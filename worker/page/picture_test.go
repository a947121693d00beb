package page_test

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"os"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
	"github.com/sluice-go/sluice/worker/page"
)

// busy returns a site where seven policies are in states of every kind.
func busy(t testing.TB, client *redis.Client) *site {
	t.Helper()
	s, ms := time.Second, time.Millisecond
	shared := func(name string, limit int64, period time.Duration) throttle.Window {
		return throttle.Window{Name: name, Limit: limit, Period: period, Scope: throttle.ScopeShared}
	}
	policies := []throttle.Policy{
		{Name: "payments-eu", Match: []string{"pay:*"}, Windows: []throttle.Window{shared("gateway", 20, s)}},
		{Name: "llm", Match: []string{"llm:*"}, Windows: []throttle.Window{shared("requests", 120, time.Minute)}},
		{Name: "github-api", Match: []string{"gh:*"}, Windows: []throttle.Window{
			shared("provider", 10, s), shared("daily", 500_000, 24*time.Hour), {Name: "per-minute", Limit: 240, Period: time.Minute},
		}},
		{Name: "mail", Match: []string{"mail:*"}, Windows: []throttle.Window{{Name: "per-tenant", Limit: 3, Period: time.Minute}}},
		{Name: "search-index-of-the-european-catalogue-v2", Match: []string{"search:*"}, Mode: throttle.ModeObserve,
			Windows: []throttle.Window{shared("cluster", 30, s)}},
		{Name: "webhooks", Match: []string{"hook:*"}, Fail: throttle.FailOpen, Windows: []throttle.Window{shared("outbound", 100, s)}},
	}
	limiter, err := throttle.New(throttle.Config{Client: client, Name: "worker-7", Policies: policies})
	sitetest.Must(t, err)
	opt := asynq.RedisClientOpt{Addr: client.Options().Addr}
	enqueuer, err := worker.NewClient(opt, worker.ClientConfig{Limiter: limiter, LimiterTimeout: time.Minute})
	sitetest.Must(t, err)
	t.Cleanup(func() { enqueuer.Close() })
	store, err := control.NewStore(limiter)
	sitetest.Must(t, err)
	ctx := t.Context()
	if _, err := store.Publish(ctx, policies, 0, control.By{Who: "ci-deploy", Why: "first version, PR 801"}); err != nil {
		t.Fatal(err)
	}
	for i, of := range []struct {
		tenant, kind, queue string
		n                   int
	}{
		{"northwind-traders-international-logistics-and-freight-forwarding-gmbh-eu-central-1", "gh:sync", "bulk", 20},
		{"acme", "gh:sync", "live", 1170}, {"beta", "gh:sync", "live", 804}, {"zeta", "gh:sync", "live", 504}, {hostile, "gh:sync", "live", 41},
		{"beta", "llm:ask", "default", 724}, {"acme", "pay:charge", "payments", 212}, {"zeta", "mail:send", "default", 40}, {"acme", "mail:send", "default", 30},
	} {
		var tasks []*asynq.Task
		for range of.n {
			tasks = append(tasks, worker.NewTask(worker.Identity{Tenant: of.tenant}, of.kind, nil))
		}
		for _, e := range enqueuer.EnqueueBulk(ctx, tasks, asynq.Queue(of.queue)) {
			if e.Err != nil {
				t.Fatal(i, e.Err)
			}
		}
	}
	// What was recorded in the last hour.
	now := time.Now()
	for name, of := range map[string][2]float64{"payments-eu": {20, 212}, "llm": {2, 724}, "github-api": {10, 2539}, "mail": {5, 70}, "webhooks": {42, 0},
		"search-index-of-the-european-catalogue-v2": {33, 0}} {
		for ago := 60; ago >= 0; ago-- {
			at := now.Add(-time.Duration(ago) * time.Minute).UTC()
			granted, waiting := of[0]*60*(1+.05*math.Sin(float64(ago*ago))), of[1]*(1+.1*math.Sin(float64(ago)/9))
			if name == "payments-eu" && ago < 5 || name == "llm" && ago < 2 {
				granted = 0
			}
			if name == "github-api" && ago > 14 && ago < 25 {
				granted *= .6
				client.HSet(ctx, fmt.Sprintf("sluice:{%s}:h:%d", name, at.Unix()/3600), fmt.Sprint(at.Minute(), "r"), ago%3)
			}
			client.HSet(ctx, fmt.Sprintf("sluice:{%s}:h:%d", name, at.Unix()/3600),
				fmt.Sprint(at.Minute(), "g"), int(granted), fmt.Sprint(at.Minute(), "w"), int(waiting))
		}
	}
	inspector := asynq.NewInspector(opt)
	t.Cleanup(func() { inspector.Close() })
	serve := func(ctx context.Context) {
		for _, line := range limiter.Lines() {
			queues := map[string]int{}
			for q, priority := range map[string]int{"live": 3, "default": 2, "bulk": 1} {
				queues[identityOf(t, client)+"/"+q] = priority
			}
			_, _ = limiter.Line(line).Take(ctx, throttle.TakeOptions{Queues: queues, Max: 10, Strict: true})
		}
		for range 12 {
			_, _ = limiter.Reserve(ctx, throttle.Request{Policy: "webhooks", Tenant: "acme"})
		}
	}
	serve(ctx)
	d, err := limiter.Reserve(ctx, throttle.Request{Policy: "llm", Tenant: "beta", Exempt: true})
	sitetest.Must(t, err)
	if _, err := d.Reservation.Pause(ctx, 3*time.Minute, "429"); err != nil {
		t.Fatal(err)
	}
	must := func(err error) {
		t.Helper()
		sitetest.Must(t, err)
	}
	must(store.Pause(ctx, "github-api", "small", 30*time.Minute, control.By{Who: "on-call", Why: "sends duplicates, INC-31"}))
	must(store.SetOverride(ctx, throttle.TenantOverride{Policy: "mail", Tenant: hostile, Weight: 4}, time.Hour, control.By{Who: "<b>on-call</b>", Why: "their newsletter, INC-27"}))
	must(store.SetOverride(ctx, throttle.TenantOverride{Policy: "github-api", Tenant: "acme", Weight: 2}, 2*time.Hour, control.By{Who: "on-call", Why: "migration, INC-30"}))
	stop := make(chan struct{})
	go func() {
		for tick := time.NewTicker(100 * ms); ; {
			select {
			case <-tick.C:
				serve(context.Background())
			case <-stop:
				return
			}
		}
	}()
	t.Cleanup(func() { close(stop) })
	return &site{TB: t, control: store, limiter: limiter, url: serveSite(t, page.Config{
		Asynqmon: "https://ops.example.com/asynqmon", Client: enqueuer, Control: store, Inspector: inspector, Limiter: limiter,
		Queues: opt, Token: token,
	})}
}

func identityOf(t testing.TB, client *redis.Client) string {
	t.Helper()
	id, err := client.Get(t.Context(), "sluice:asynq").Result()
	if err != nil {
		return ""
	}
	return id
}

// Pictures of the page, for people to look at, and for the README.
func TestPictures(t *testing.T) {
	if os.Getenv(shotsEnv) == "" {
		t.Skip("set " + shotsEnv + "=DIR")
	}
	server := throttletest.Miniredis(t)
	s := busy(t, throttletest.Client(t, server.Addr()))
	for range 85 { // until no server has asked for the queue of payments, and bulk starves
		s.visitor().get("")
		time.Sleep(time.Second)
	}
	b := chromium(t)
	for _, width := range []int{1400, 400} {
		for _, colours := range []string{"light", "dark"} {
			b.look(width, colours)
			for name, path := range map[string]string{"home": "", "policy": "?policy=github-api", "tenant": "?policy=github-api&tenant=acme", "search": "?find=acme"} {
				b.open(s.url + path)
				b.shoot(fmt.Sprintf("%s-%d-%s", name, width, colours))
				b.axe()
			}
		}
	}
	b.look(1400, "light")
	b.open(s.url)
	b.eval("document.querySelector('footer summary').click(); document.querySelector('[name=who]').value='on-call'; document.querySelector('[name=token]').value=" +
		fmt.Sprintf("%q", token) + "; document.querySelector('footer form').submit()")
	b.until("document.body.innerText.includes('Signed in as')")
	b.open(s.url + "?policy=github-api")
	b.eval("document.getElementById('change-limit').open = true")
	b.shoot("act-1400-light")
	b.axe()
	b.eval("document.querySelector('#change-limit [name=limit]').value = '15'; document.querySelector('#change-limit [name=why]').value = 'INC-32'; " +
		"document.querySelector('#change-limit button').click()")
	b.until("document.getElementById('confirm') !== null")
	b.shoot("preview-1400-light")
	b.axe()
	server.Close()
	http.Get(s.url)
	time.Sleep(2 * time.Second)
	for _, width := range []int{1400, 400} {
		b.look(width, "light")
		b.open(s.url)
		b.shoot(fmt.Sprintf("down-%d-light", width))
		b.axe()
	}
}
