package main

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

func TestFatesAreDrawnAtTheirRates(t *testing.T) {
	t.Parallel()
	const n, rate = 20_000, 0.01
	got := map[fate]float64{}
	for i := range uint64(n) {
		f, delay := fateOf(7, dequeues, i, rate)
		again, same := fateOf(7, dequeues, i, rate)
		expect.Require(t, again == f && same == delay, "call", i, f, "then", again)
		expect.Equal(t, (f == delayed), (delay > 0), "call", i, f, "for", delay)
		got[f]++
	}
	for _, f := range []fate{cut, dropped, delayed} {
		part := got[f] / n
		expect.That(t, math.Abs(part-rate) <= 4*math.Sqrt(rate*(1-rate)/n), f, part, "of all calls, want about", rate)
	}
	f, _ := fateOf(7, dequeues, 1, 0)
	expect.That(t, f == passes, "no faults asked for, and", f)
}

func TestJobsAndDisruptionsComeFromTheSeed(t *testing.T) {
	t.Parallel()
	const length = 5 * time.Minute
	jobs := makeJobs(3, length)
	expect.That(t, slices.Equal(jobs, makeJobs(3, length)) && !slices.Equal(jobs, makeJobs(4, length)),
		"jobs are not those of the seed")
	seen := map[string]int{}
	for i, j := range jobs {
		expect.That(t, (i <= 0 || j.At >= jobs[i-1].At) && j.At < length, j.ID, "is enqueued at", j.At)
		seen[j.Tenant]++
		for what, is := range map[string]bool{
			"archives": j.archives(), "fails at first": j.Fails > 0 && !j.archives(), "no retries": j.MaxRetry == 0,
			"joins": j.Joins, "batched": j.Batched && j.Joins, "retained": j.Retained, "unique": j.Unique,
			"later": j.Delay > 0, "panics": j.Panics && j.Fails > 0,
		} {
			if is {
				seen[what]++
			}
		}
	}
	for _, what := range []string{
		"acme", "beta", "chip", "dune", "echo", "archives", "fails at first", "no retries",
		"joins", "batched", "retained", "unique", "later", "panics",
	} {
		const rarest = 0.04
		n := float64(len(jobs))
		expect.That(t, float64(seen[what]) >= n*rarest-4*math.Sqrt(n*rarest*(1-rarest)),
			seen[what], "of", len(jobs), "jobs:", what)
	}
	disruptions := makeDisruptions(3, length, 3*time.Second, 3)
	expect.That(t, slices.Equal(disruptions, makeDisruptions(3, length, 3*time.Second, 3)), "disruptions are not those of the seed")
	kinds := map[string]int{}
	for _, b := range disruptions {
		kinds[b.kind]++
		expect.That(t, b.at+b.lasts <= length && b.worker >= 0 && b.worker <= 2, b)
	}
	for _, kind := range []string{kill, term, stop, flush} {
		expect.That(t, kinds[kind] != 0, "no disruption is a", kind)
	}
	expect.That(t, makeDisruptions(3, length, 0, 3) == nil, "none asked for")
}
