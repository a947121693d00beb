package main

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/policyfile"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/throttle/usage"
	"github.com/sluice-go/sluice/worker"
)

const livePolicies = `
policies:
  - name: api
    match: [call]
    upstream_shared: true
    windows:
      - {name: own, limit: 1, period: 1h}
      - {name: shared, limit: 2, period: 1h, shared: true}
`

// A liveWorkspace is a workspace with a Redis, and a limiter of its policies.
type liveWorkspace struct {
	workspace
	addr    string
	flush   func() // writes what was used
	limiter *throttle.Limiter
}

func newLiveWorkspace(t *testing.T, policyFile string) liveWorkspace {
	d := liveWorkspace{workspace: newWorkspace(t, policyFile, ""), addr: throttletest.Redis(t)}
	policies := valueOf(policyfile.Load(d.path("policies.yml")))(t)
	client := redis.NewClient(&redis.Options{Addr: d.addr})
	t.Cleanup(func() { client.Close() })
	counter := usage.New()
	d.limiter = valueOf(throttle.New(throttle.Config{
		Client: client, Name: "worker-7", Observer: counter.Observe, Policies: policies,
	}))(t)
	d.flush = counter.Start(d.limiter)
	return d
}

// reserves has a tenant ask by a ticket, which waits if it does not fit.
func (d liveWorkspace) reserves(t *testing.T, tenant, ticket string) throttle.Decision {
	t.Helper()
	r := throttle.Request{Policy: "api", Tenant: tenant, Ticket: throttle.Ticket{Queue: "0a/default", ID: ticket}}
	decision := valueOf(d.limiter.Reserve(t.Context(), r))(t)
	return decision
}

// look runs the program without a policy file.
func (d liveWorkspace) look(args ...string) runResult {
	return runMain(d.t.Context(), "", append(args, "--redis", "redis://"+d.addr)...)
}

func (d liveWorkspace) run(t *testing.T, command string, args ...string) runResult {
	flags := []string{command, "--policies", d.path("policies.yml"), "--redis", "redis://" + d.addr}
	return runMain(t.Context(), "", append(flags, args...)...)
}

func TestStatusShowsWhoWaits(t *testing.T) {
	t.Parallel()
	d := newLiveWorkspace(t, livePolicies)
	first := d.reserves(t, "acme", "1")
	for i := range 3 {
		d.reserves(t, "acme", fmt.Sprint("w", i))
	}
	d.reserves(t, "z\x1bz", "z1")
	d.reserves(t, "z\x1bz", "z2")
	d.flush()
	d.run(t, "status").want(t, exitDone).says(t,
		": 4 tickets waiting", " shared ", " default live ", "granted in the last hour to ", "acme 50%", " acme default live 3 ", ` "z\x1bz" default live 1 `, "own 1/1")
	must(t, errOf(first.Reservation.Pause(t.Context(), time.Hour, "429")))
	e := d.run(t, "status", "api", "acme").want(t, exitDone).says(t, " by the upstream's 429 to acme, reported by worker-7\n")
	that(t, !strings.Contains(e.stdout, "z1"), e.stdout)
	got := decoded[fleetStatus](t, d.run(t, "status", "--json", "--tenants", "1"))
	that(t, len(got.Policies) == 1 && len(got.Policies[0].Tenants) == 1 && got.Policies[0].Waiting == 4 && got.Policies[0].More, got)
	d.run(t, "status", "apis").want(t, exitBadInput, `policy "apis": must be one of api`)
	d.run(t, "status", "--tenants", "0").want(t, exitBadInput, `"0" for flag -tenants: must be 1 to 500: see "sluice status -h"`)
	runMain(t.Context(), "", "status", "--policies", d.path("policies.yml")).
		want(t, exitBadInput, "there is no Redis: --redis must be the URL")
	runMain(t.Context(), "", "status", "--policies", d.path("policies.yml"), "--redis", "redis://127.0.0.1:1").
		want(t, exitFailed, "must be a Redis that answers")
}

func TestSimulateSaysWhenTheBacklogIsDone(t *testing.T) {
	t.Parallel()
	d := newLiveWorkspace(t, livePolicies)
	d.reserves(t, "acme", "1")
	for i := range 3 {
		d.reserves(t, "acme", fmt.Sprint("w", i))
	}
	text := d.run(t, "simulate", "--limit", "own@acme=2", "--limit", "shared=100").want(t, exitDone).stdout
	pattern := regexp.MustCompile(`policy api: 3 tickets waiting, all started in (3h|2h59m) now, in (1h|59m\d+s) then`) // some seconds later
	that(t, pattern.MatchString(text), text)
	got := decoded[simulated](t, d.run(t, "simulate", "--limit", "own=4", "--limit", "shared=4", "--weight", "acme=2", "--json"))
	equal(t, got.Now.Expected.Sub(got.Now.At).Round(time.Minute), 3*time.Hour)
	that(t, got.If.Expected.Equal(got.If.At), got.If)
	that(t, !d.reserves(t, "acme", "w1").Granted, "it changed the policy")
	for flag, want := range map[string]string{
		"":                `--limit and --weight are missing`,
		"--limit=own":     `--limit "own": must be WINDOW=N`,
		"--limit=own=x":   `--limit "own=x": must be WINDOW=N`,
		"--limit=other=2": `window "other": must be one of own, shared`,
		"--limit=own=0":   `limit 0: `,
		"--limit=own@a=0": `--limit "own@a=0": must be WINDOW=N`,
		"--weight=acme=x": `--weight "acme=x": must be TENANT=W`,
		"--weight=acme=0": `--weight "acme=0": must be TENANT=W`,
	} {
		d.run(t, "simulate", strings.Fields(flag)...).want(t, exitBadInput, want)
	}
}

func TestDoctorSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	d := newLiveWorkspace(t, livePolicies)
	d.run(t, "doctor").want(t, exitDone).says(t, "ok: ")
	client := redis.NewClient(&redis.Options{Addr: d.addr})
	defer client.Close()
	client.ConfigSet(t.Context(), "maxmemory-policy", "allkeys-lru")
	got := decoded[diagnosis](t, d.run(t, "doctor", "--json").want(t, exitFailed))
	that(t, !got.OK && len(got.Findings) == 1 && strings.Contains(got.Findings[0], "noeviction"), got)
	must(t, client.Do(t.Context(), "acl", "setuser", "half", "on", "nopass", "~*", "+@all", "-set", "-info").Err())
	for url, want := range map[string]string{
		"redis://half:any@" + d.addr: "finding: redis: its user may not call set: must be allowed",
		"redis://127.0.0.1:1":        "finding: --redis: ",
	} {
		runMain(t.Context(), "", "doctor", "--policies", d.path("policies.yml"), "--redis", url).want(t, exitFailed).says(t, want)
	}
	must(t, client.Do(t.Context(), "replicaof", "127.0.0.1", "1").Err())
	d.run(t, "doctor").want(t, exitFailed).says(t, "maxmemory-policy is allkeys-lru", "READONLY")
}

func TestExplainSaysWhyATaskWaits(t *testing.T) {
	t.Parallel()
	d := newLiveWorkspace(t, livePolicies)
	client := valueOf(worker.NewClient(asynq.RedisClientOpt{Addr: d.addr}, worker.ClientConfig{Limiter: d.limiter, LimiterTimeout: time.Minute}))(t)
	defer client.Close()
	d.reserves(t, "zeta", "z1")
	d.flush()
	for i := range 2 {
		task := worker.NewTask(worker.Identity{Tenant: "acme"}, "call", nil)
		must(t, errOf(client.EnqueueContext(t.Context(), task, asynq.TaskID(fmt.Sprint("t", i)))))
	}
	d.run(t, "explain", "t1").want(t, exitDone).says(t, `task "t1" of queue "default": scheduled`,
		"acme 2 of 2 ", "own tenant=acme 0 1 requests", "shared shared 1 2 requests", "\ngranted in the last hour to zeta 100%\npolicies: ")
	got := decoded[explained](t, d.run(t, "explain", "t1", "--json"))
	that(t, got.Line != nil && got.Line.Position == 2 && got.Policy == "api", got)
	that(t, len(got.Used) == 1 && got.Used[0].Tenant == "zeta", got)
	d.run(t, "explain", "t9").want(t, exitFailed).says(t, "asynq has no such task")
	d.run(t, "explain").want(t, exitBadInput, "explain needs the arguments ID")
}

// A watched status is a line of JSON each time, until it is interrupted, also after a restart of Redis.
func TestStatusIsShownLive(t *testing.T) {
	t.Parallel()
	d, server := newWorkspace(t, livePolicies, ""), throttletest.Miniredis(t)
	on := []string{"--redis", "redis://" + server.Addr()}
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	lines, errorLines := 0, 0
	out := &commandOutput{onWrite: func(text string) {
		switch lines = strings.Count(text, "\n"); lines {
		case 1:
			pause := []string{"pause", "api", "--for", "1h", "--by", "alice", "--why", "the API moves"}
			runMain(ctx, "", append(pause, on...)...).want(t, exitDone)
			server.Close()
		case 3:
			interrupt()
		}
	}}
	failures := &commandOutput{onWrite: func(text string) {
		if errorLines = strings.Count(text, "\n"); errorLines == 1 {
			must(t, server.Restart())
		}
	}}
	m := NewMain()
	m.Stdout, m.Stderr = out, failures
	watch := []string{"status", "--watch", "--every", "100ms", "--json", "--policies", d.path("policies.yml")}
	code := m.Run(ctx, append(watch, on...))
	that(t, code == exitDone && lines >= 3 && errorLines > 0, "exit code", code, "after", lines, "lines", failures.String())
	last := slices.Collect(strings.Lines(out.String()))[lines-1]
	contains(t, last, `"cause":"the API moves"`, "it knows nothing of an operator's pause since")
}

// wantLines fails unless the output has all of these lines.
func wantLines(t *testing.T, output string, lines ...string) {
	t.Helper()
	for _, want := range lines {
		contains(t, "\n"+output, "\n"+want+"\n", "no line", want, "in", output)
	}
}

// Which processes run which policies, and what a program is told whose own policies differ.
func TestProcessesAreToldApartByWhatTheyRun(t *testing.T) {
	t.Parallel()
	d := newLiveWorkspace(t, livePolicies)
	c := d.limiter.Config()
	store := control.StoreOf(d.limiter)
	published := d.limiter.Policies()
	published[0].Windows[1].Limit = 3
	var log bytes.Buffer
	follow := func(name string, keep bool) {
		c.Logger, c.Name, c.Policies = slog.New(slog.NewTextHandler(&log, nil)), name, d.limiter.Policies()
		l := valueOf(throttle.New(c))(t)
		f := control.StoreOf(l).Follow(t.Context(), control.FollowConfig{KeepPolicies: keep})
		t.Cleanup(func() { f.Close() })
	}
	must(t, errOf(store.Publish(t.Context(), published, 0, control.Author{Who: "ada", Why: "test"})))
	follow("w-1", false)
	follow("w\x1b2", false)
	size := log.Len()
	follow("w-3", true)
	_, digest, _ := strings.Cut(log.String(), " own=")
	digest, _, _ = strings.Cut(digest, " ")
	for i, text := range []string{log.String()[:size], log.String()[size:]} {
		want := []string{`keeps its own"=false`, `keeps its own"=true`}[i]
		that(t, strings.Contains(text, "level=WARN") && strings.Contains(text, "own="+digest+" published=1 \""+want) &&
			strings.Contains(text, `differs="api/shared 2/h -> 3/h"`), text)
	}
	e := d.look("status").want(t, exitDone)
	wantLines(t, e.stdout, "1 process runs its own policies "+digest+": w-3", `2 processes run published version 1: "w\x1b2", w-1`)
}

// What operators are told of policies that were removed, and of lines that nobody serves.
func TestLinesWithoutAPolicyAreTold(t *testing.T) {
	t.Parallel()
	d := newLiveWorkspace(t, livePolicies)
	store := control.StoreOf(d.limiter)
	publish := func(version int64, policies ...throttle.Policy) {
		t.Helper()
		must(t, errOf(store.Publish(t.Context(), policies, version, control.Author{Who: "ada", Why: "test"})))
	}
	look := func(args ...string) string { t.Helper(); return d.look(args...).want(t, exitDone).stdout }
	for _, ticket := range []string{"1", "2", "3"} {
		d.reserves(t, "a|b,{c}", ticket)
	}
	wantLines(t, look("doctor"),
		"warning: policy api is not published, and has 2 tasks in line: workers must have it in their files; else each waits until asynq has it due, and goes by the policy that matches then")
	publish(0, d.limiter.Policies()...)
	publish(1, throttle.Policy{Name: "other", Windows: d.limiter.Policies()[0].Windows})
	wantLines(t, look("doctor"), "warning: policy api was removed, and has 2 tasks in line: what waits goes on by its last windows")
	wantLines(t, look("status"), "the policy was removed: what waits goes on by its last windows")
	look("pause", "api", "--for", "1h", "--by", "anna", "--why", "x")
	wantLines(t, look("resume", "api", "--by", "anna", "--why", "x"), "api is not paused any more by an operator (a pause by the upstream, if any, ends by its tenant, or by Limiter.Resume)")
	must(t, d.limiter.Config().Client.HSet(t.Context(), "sluice:{!control}:state", "policies", "3 {").Err())
	for _, args := range [][]string{{"limits", "show"}, {"limits", "show", "api"}, {"doctor"}} {
		e := d.look(args...).want(t, exitFailed)
		that(t, strings.Contains(e.stdout+e.stderr, "published policies cannot be read"), args, e.stdout, e.stderr)
	}
}

// What a fleet of three workers obeys is what status says, at each step of a bad day.
func TestStatusTellsWhatTheFleetObeys(t *testing.T) {
	t.Parallel()
	d := newLiveWorkspace(t, livePolicies)
	tenants := []string{"acme", "a|b,{c}", "{x}:%", "\x1b[2J", "zoë \"q\""}
	act := func(args ...string) { d.look(append(args, "--by", "anna", "--why", "INC-7")...).want(t, exitDone) }
	store := control.StoreOf(d.limiter)
	published := d.limiter.Policies()
	published[0].Windows[0].Limit, published[0].Windows[1].Limit = 3, 4
	watch := throttle.Policy{Name: "watch", Match: []string{"w"}, Observe: true, Windows: published[0].Windows[1:]}
	publish := func(version int64, policies ...throttle.Policy) {
		t.Helper()
		must(t, errOf(store.Publish(t.Context(), policies, version, control.Author{Who: "ada", Why: "test"})))
	}
	publish(0, published[0], watch)
	fleet := make([]*throttle.Limiter, 3)
	for i := range fleet {
		c := d.limiter.Config()
		c.Logger, c.Name, c.Policies = slog.New(slog.DiscardHandler), fmt.Sprint("w-", i), nil
		limiter := valueOf(throttle.New(c))(t)
		fleet[i] = limiter
		f := control.StoreOf(limiter).Follow(t.Context(), control.FollowConfig{})
		t.Cleanup(func() { f.Close() })
	}
	client, err := worker.NewClient(asynq.RedisClientOpt{Addr: d.addr}, worker.ClientConfig{Limiter: fleet[0], LimiterTimeout: time.Minute})
	must(t, err)
	t.Cleanup(func() { client.Close() })
	inspector := asynq.NewInspector(asynq.RedisClientOpt{Addr: d.addr})
	t.Cleanup(func() { inspector.Close() })
	var granted throttle.Decision
	day := []struct {
		name string
		do   func()
		want []string
	}{
		{"a backlog", func() {
			for i := range 4 {
				granted, err = fleet[i%3].Reserve(t.Context(), throttle.Request{Policy: "api", Tenant: tenants[i]})
				must(t, err)
			}
			for i, tenant := range tenants {
				task := worker.NewTask(worker.Identity{Tenant: tenant}, "call", nil)
				must(t, errOf(client.EnqueueContext(t.Context(), task, asynq.TaskID(fmt.Sprint("t", i)))))
			}
		}, []string{
			"policies: published version 1", "3 processes run published version 1: w-0, w-1, w-2", "5 tickets waiting", " shared 4 4 requests",
			"acme default live 1 ", "a|b,{c} default live 1 ", "{x}:% default live 1 ", `"\x1b[2J" default live 1 `, `zoë "q" default live 1 `, "default live 5 5 ", "the policy only observes: nothing is denied",
		}},
		{"a limit is raised", func() { act("limits", "set", "api", "shared", "--limit", "15") }, []string{"published version 2", " shared 4 15 requests"}},
		{"a limit is cut for a while", func() { act("limits", "set", "api", "shared", "--limit", "2", "--for", "2h") },
			[]string{"published version 2", " shared 4 2 requests"}},
		{"the queue is paused", func() { must(t, inspector.PauseQueue("default")) }, []string{"paused by asynq's tools: no server takes from it"}},
		{"the upstream has little left", func() {
			must(t, fleet[1].Attach(granted.Reservation).ReportRemaining(t.Context(), throttle.Requests, 1, time.Hour))
		}, []string{"1 requests left until "}},
		{"it refuses", func() {
			must(t, errOf(fleet[1].Attach(granted.Reservation).Pause(t.Context(), time.Hour, "429")))
		}, []string{`by the upstream's 429 to "\x1b[2J", reported by w-1`, "refused once since "}},
		{"an operator pauses", func() { act("pause", "api", "--for", "3h") }, []string{"by hand: INC-7, set by anna"}},
		{"the policy is removed", func() { publish(2, watch) }, []string{"the policy was removed: what waits goes on by its last windows"}},
	}
	for _, step := range day {
		step.do()
		t.Log(step.name)
		d.look("status").want(t, exitDone).says(t, step.want...)
	}
	d.look("explain", "t0").want(t, exitDone).says(t, "it waits in line for policy api, delayed by a pause")
}
