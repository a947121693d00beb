package main

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/worker"
)

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
	d := newLiveDesk(t)
	c := d.limiter.Config()
	store, err := control.NewStore(d.limiter)
	must(t, err)
	published := d.limiter.Policies()
	published[0].Windows[1].Limit = 3
	var log bytes.Buffer
	follow := func(name string, keep bool) {
		c.Logger, c.Name, c.Policies = slog.New(slog.NewTextHandler(&log, nil)), name, d.limiter.Policies()
		l, err := throttle.New(c)
		must(t, err)
		own, err := control.NewStore(l)
		must(t, err)
		f, err := control.Follow(t.Context(), control.FollowConfig{KeepPolicies: keep, Store: own})
		must(t, err)
		t.Cleanup(func() { f.Close() })
	}
	must(t, errOf(store.Publish(t.Context(), published, 0, control.By{Who: "ada", Why: "test"})))
	follow("w-1", false)
	follow("w\x1b2", false)
	own := log.Len()
	follow("w-3", true)
	_, digest, _ := strings.Cut(log.String(), " own=")
	digest, _, _ = strings.Cut(digest, " ")
	for i, text := range []string{log.String()[:own], log.String()[own:]} {
		want := []string{`in force"=published`, `in force"=own`}[i]
		if !strings.Contains(text, "level=WARN") || !strings.Contains(text, "own="+digest+" published=1 \""+want) ||
			!strings.Contains(text, `differs="api/shared 2/h -> 3/h"`) {
			t.Errorf("%s", text)
		}
	}
	e := d.look("status").want(t, exitDone)
	wantLines(t, e.stdout, "1 process runs its own policies "+digest+": w-3", `2 processes run published version 1: "w\x1b2", w-1`)
}

// What operators are told of policies that were removed, and of lines that nobody serves.
func TestLinesWithoutAPolicyAreTold(t *testing.T) {
	t.Parallel()
	d := newLiveDesk(t)
	store, err := control.NewStore(d.limiter)
	must(t, err)
	publish := func(version int64, policies ...throttle.Policy) {
		t.Helper()
		must(t, errOf(store.Publish(t.Context(), policies, version, control.By{Who: "ada", Why: "test"})))
	}
	look := func(args ...string) string { t.Helper(); return d.look(args...).want(t, exitDone).stdout }
	for _, ticket := range []string{"1", "2", "3"} {
		d.reserves(t, "a|b,{c}", ticket)
	}
	wantLines(t, look("doctor"),
		"warning: policy api is not published, and has 2 tasks in line: workers must have it in their files, or nobody takes them")
	publish(0, d.limiter.Policies()...)
	publish(1, throttle.Policy{Name: "other", Windows: d.limiter.Policies()[0].Windows})
	const removed = "policy api was removed: 2 tasks go on by its last windows"
	wantLines(t, look("doctor"), "warning: "+removed)
	wantLines(t, look("status"), removed)
}

// What a fleet of three workers obeys is what status says, at each step of a bad day.
func TestStatusTellsWhatTheFleetObeys(t *testing.T) {
	t.Parallel()
	d := newLiveDesk(t)
	tenants := []string{"acme", "a|b,{c}", "{x}:%", "\x1b[2J", "zoë \"q\""}
	act := func(args ...string) { d.look(append(args, "--by", "anna", "--why", "INC-7")...).want(t, exitDone) }
	store, err := control.NewStore(d.limiter)
	must(t, err)
	published := d.limiter.Policies()
	published[0].Windows[0].Limit, published[0].Windows[1].Limit = 3, 4
	watch := throttle.Policy{Name: "watch", Match: []string{"w"}, Mode: throttle.ModeObserve, Windows: published[0].Windows[1:]}
	publish := func(version int64, policies ...throttle.Policy) {
		t.Helper()
		_, err := store.Publish(t.Context(), policies, version, control.By{Who: "ada", Why: "test"})
		must(t, err)
	}
	publish(0, published[0], watch)
	fleet := make([]*throttle.Limiter, 3)
	for i := range fleet {
		c := d.limiter.Config()
		c.Logger, c.Name, c.Policies = slog.New(slog.DiscardHandler), fmt.Sprint("w-", i), nil
		fleet[i], err = throttle.New(c)
		must(t, err)
		own, err := control.NewStore(fleet[i])
		must(t, err)
		f, err := control.Follow(t.Context(), control.FollowConfig{Store: own})
		must(t, err)
		t.Cleanup(func() { f.Close() })
	}
	client, err := worker.NewClient(asynq.RedisClientOpt{Addr: d.addr}, worker.ClientConfig{Limiter: fleet[0]})
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
				_, err := client.EnqueueContext(t.Context(), task, asynq.TaskID(fmt.Sprint("t", i)))
				must(t, err)
			}
		}, []string{
			"policies: published version 1", "3 processes run published version 1: w-0, w-1, w-2", "5 tickets waiting", " shared 4 4 requests",
			"acme 1 ", "a|b,{c} 1 ", "{x}:% 1 ", `"\x1b[2J" 1 `, `zoë "q" 1 `, "default live 5 5 ", "the policy only observes: nothing is denied",
		}},
		{"a limit is raised", func() { act("limits", "set", "api", "shared", "--limit", "15") }, []string{"published version 2", " shared 4 15 requests"}},
		{"a limit is cut for a while", func() { act("limits", "set", "api", "shared", "--limit", "2", "--for", "2h") },
			[]string{"published version 2", " shared 4 2 requests"}},
		{"the queue is paused", func() { must(t, inspector.PauseQueue("default")) }, []string{"paused by asynq's tools: no server takes from it"}},
		{"the upstream has little left", func() {
			left := throttle.Remaining{Unit: throttle.Requests, Units: 1, Reset: time.Hour}
			must(t, fleet[1].Attach(granted.Reservation).ReportRemaining(t.Context(), left))
		}, []string{"1 requests left until "}},
		{"it refuses", func() {
			_, err := fleet[1].Attach(granted.Reservation).Pause(t.Context(), time.Hour, "429")
			must(t, err)
		}, []string{`by the upstream's 429 to "\x1b[2J", reported by w-1`, "refused once since "}},
		{"an operator pauses", func() { act("pause", "api", "--for", "3h") }, []string{"by hand: INC-7, set by anna"}},
		{"the policy is removed", func() { publish(2, watch) }, []string{"policy api was removed: 5 tasks go on by its last windows"}},
	}
	for _, step := range day {
		step.do()
		t.Log(step.name)
		d.look("status").want(t, exitDone).says(t, step.want...)
	}
	d.look("explain", "t0").want(t, exitDone).says(t, "it waits in line for policy api, delayed by a pause")
}
