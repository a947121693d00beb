package main

import (
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

// What operators are told of policies that were removed, and of lines that nobody serves.
func TestLinesWithoutAPolicyAreTold(t *testing.T) {
	t.Parallel()
	d := newLiveDesk(t)
	store, err := control.NewStore(d.limiter.Config().Client, "")
	if err != nil {
		t.Fatal(err)
	}
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
		"warning: policy api is not published, and 2 tasks wait in its line: workers must have it in their files, or nobody takes them")
	publish(0, d.limiter.Policies()...)
	publish(1, throttle.Policy{Name: "other", Windows: d.limiter.Policies()[0].Windows})
	const removed = "policy api was removed: 2 tasks go on by its last windows"
	wantLines(t, look("doctor"), "warning: "+removed)
	wantLines(t, look("status"), removed)
}
