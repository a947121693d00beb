package main

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
)

// wantLines fails unless the output has all of these lines.
func wantLines(t *testing.T, output string, lines ...string) {
	t.Helper()
	for _, want := range lines {
		if !strings.Contains("\n"+output, "\n"+want+"\n") {
			t.Errorf("no line %q in\n%s", want, output)
		}
	}
}

// Which processes run which policies, and what a program is told whose own policies differ.
func TestProcessesAreToldApartByWhatTheyRun(t *testing.T) {
	t.Parallel()
	d := newLiveDesk(t)
	c := d.limiter.Config()
	store, err := control.NewStore(d.limiter)
	if err != nil {
		t.Fatal(err)
	}
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
	if _, err := store.Publish(t.Context(), published, 0, control.By{Who: "ada", Why: "test"}); err != nil {
		t.Fatal(err)
	}
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
	e := runMain(t.Context(), "", "status", "--redis", "redis://"+d.addr)
	e.want(t, exitDone)
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
		if _, err := store.Publish(t.Context(), policies, version, control.By{Who: "ada", Why: "test"}); err != nil {
			t.Fatal(err)
		}
	}
	look := func(args ...string) string {
		t.Helper()
		e := runMain(t.Context(), "", append(args, "--redis", "redis://"+d.addr)...)
		e.want(t, exitDone)
		return e.stdout
	}
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
