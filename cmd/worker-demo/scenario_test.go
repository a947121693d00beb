package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/scenario"
)

// shortScenario has an API that counts over a fifth of the time that it publishes: calls of a busy
// machine are late, and arrive bunched.
func shortScenario() scenario.Scenario {
	s := scenario.Default()
	for i := range s.API.Limits {
		s.API.Limits[i].Span /= 5
	}
	s.API.Trouble = scenario.Trouble{}
	s.Nightly = scenario.Nightly{Each: 3, Tenants: []string{"medium"}}
	s.Tenants = []scenario.Tenant{{Jobs: 5, Name: "large"}, {Jobs: 3, Name: "medium"}, {Jobs: 6, Name: "plain", Plain: true}}
	return s
}

func TestTheScenarioKeepsItsPromises(t *testing.T) {
	t.Parallel()
	e := runMain(t.Context(), "")
	e.want(t, exitDone, "14 jobs of 3 tenants", `Those of "plain" come from a plain asynq client`, "14 of 14 jobs done, 0 failed",
		" denials, done in about ", "nightly batch: 3 of 3 tasks done, ")
	for _, text := range []string{
		"14 of 14 jobs succeeded in ",
		"TENANT JOBS WAKES PER JOB WAITED (P50) WAITED (MAX) 429s large 5 ",
		"tenant-burst 4 per 200ms large ",
		"everybody 8 per 200ms all ",
		"EXPECTED START TAKEN RETRIES USED ",
		" s throttled: third-party-api",
		"The nightly batch: 3 of 3 tasks done, ",
		"Every job is done, and the API never answered 429.",
	} {
		if !strings.Contains(columns(e.stdout), text) {
			t.Errorf("stdout does not hold %q:\n%s", text, e.stdout)
		}
	}
}

func TestTheScenarioPrintsJSON(t *testing.T) {
	t.Parallel()
	e := runMain(t.Context(), "", "--json")
	e.want(t, exitDone)
	var r scenario.Report
	if err := json.Unmarshal([]byte(e.stdout), &r); err != nil {
		t.Fatal(err)
	}
	if s := r.Summary; !r.OK || s.Jobs != 14 || s.Succeeded != 14 || s.Failed != 0 || s.Archived != 0 || s.RedisCallsPerJob != nil ||
		s.Dequeues != s.Jobs+s.Denials {
		t.Errorf("%+v", r)
	}
	if n := r.Nightly; n == nil || n.Done != 3 || n.Planned.IsZero() {
		t.Errorf("%+v", n)
	}
	if len(r.Tenants) != 3 || len(r.Limits) != 7 {
		t.Errorf("%d tenants, %d limits", len(r.Tenants), len(r.Limits))
	}
	for _, row := range r.Tenants {
		if row.Done != row.Jobs || row.Refused != 0 || row.WakesPerJob < 1 {
			t.Errorf("%+v", row)
		}
	}
	// A plain client's six jobs cannot all fit at once. On a busy machine those of others can be
	// denied, too: their join found no limiter in time.
	if len(r.Denials) == 0 || len(r.Denials) != r.Summary.Denials {
		t.Errorf("%d denials, %+v", len(r.Denials), r.Summary)
	}
	for _, row := range r.Denials {
		if row.Retried != 0 || !strings.HasPrefix(row.Reason, "throttled: third-party-api") ||
			row.ExpectedMS < row.AtMS || row.TakenMS < row.AtMS {
			t.Errorf("%+v", row)
		}
	}
	for _, row := range r.Limits {
		if row.Served < 1 || row.Served > row.Calls || row.Counted < int64(row.Served) || row.Counted > int64(row.Calls) {
			t.Errorf("%+v", row)
		}
	}
}

// An API that allows less than the throttle was told must be found out.
func TestScenarioFindsRefusals(t *testing.T) {
	t.Parallel()
	s := shortScenario()
	s.API.Limits[0].Calls, s.API.Limits[0].Span = 2, time.Second
	var stdout, stderr strings.Builder
	m := &Main{Env: noEnv, Scenario: s, Stdout: &stdout, Stderr: &stderr}
	if code := m.Run(t.Context(), nil); code != exitFailed {
		t.Errorf("exit code %d, stderr:\n%s", code, stderr.String())
	}
	refused := 0
	for _, tenant := range []string{"large", "medium", "plain"} {
		refused += s.API.Refused(tenant)
	}
	if refused == 0 || !strings.Contains(stdout.String(), "Not as it should be") {
		t.Errorf("%d refused, stdout:\n%s", refused, stdout.String())
	}
}

// An API that suddenly allows half is heard of by the first refusals, on all workers.
func TestScenarioHealsATrouble(t *testing.T) {
	t.Parallel()
	s := shortScenario()
	s.Tenants = []scenario.Tenant{{Jobs: 8, Name: "large"}, {Jobs: 8, Name: "medium"}, {Jobs: 8, Name: "small"}}
	s.API.Limits = scenario.Default().API.Limits
	s.API.Trouble = scenario.Trouble{After: time.Second, For: 3 * time.Second, Limit: "everybody"}
	var stdout, stderr strings.Builder
	m := &Main{Env: noEnv, Scenario: s, Stdout: &stdout, Stderr: &stderr}
	if code := m.Run(t.Context(), []string{"--json"}); code != exitDone {
		t.Errorf("exit code %d, stderr:\n%s", code, stderr.String())
	}
	var r scenario.Report
	if err := json.Unmarshal([]byte(stdout.String()), &r); err != nil {
		t.Fatal(err)
	}
	if !r.OK || r.Refused == 0 || r.Refused > r.RefusedMost || r.RefusedMost != 8 || r.Summary.Succeeded != 24 {
		t.Errorf("%+v", r)
	}
}
