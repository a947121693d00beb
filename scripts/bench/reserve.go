package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"text/tabwriter"
	"time"
)

type options struct {
	calls, goroutines, rounds, tenants int
	only                               *regexp.Regexp
}

// A report is what -json prints.
type report struct {
	Baseline   string `json:"baseline"` // what every ratio is to
	Calls      int    `json:"calls"`    // decisions in one measurement
	Goroutines int    `json:"goroutines"`
	Rounds     int    `json:"rounds"`
	Rows       []row  `json:"rows"`
}

// A row is one contestant, granted or denied: medians over all rounds.
type row struct {
	Name          string  `json:"name"`
	Limit         int     `json:"limit"`
	Granted       bool    `json:"granted"`
	ServerTime    float64 `json:"server_time"`             // ratio per decision
	ServerCPU     float64 `json:"server_cpu"`              // ratio per decision
	Throughput    float64 `json:"throughput"`              // ratio of decisions per second
	CallsInside   float64 `json:"redis_calls_inside"`      // per decision
	BytesATenant  int64   `json:"memory_bytes_per_tenant"` // windows full
	TenantsFilled int     `json:"memory_tenants"`          // so many were filled to know
	samples       []sample
}

// A sample is one measurement, with that of the baseline.
type sample struct{ time, cpu, throughput, inside float64 }

func reserve(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("scripts/bench/run reserve", flag.ContinueOnError)
	flags.SetOutput(stderr)
	var o options
	var asJSON bool
	var only string
	var load loadCheck
	load.flag(flags)
	flags.BoolVar(&asJSON, "json", false, "print JSON instead of a table")
	flags.IntVar(&o.calls, "calls", 4000, "`decisions` in one measurement")
	flags.IntVar(&o.goroutines, "goroutines", 64, "`number` of goroutines that ask at the same time")
	flags.StringVar(&only, "only", "", "measure only the contestants whose names match this `regexp`")
	flags.IntVar(&o.rounds, "rounds", 3, "`measurements` of each contestant")
	flags.IntVar(&o.tenants, "tenants", 10_000, "`number` of tenants for the memory column, or as many as 256 MB hold")
	if err := flags.Parse(args); err != nil {
		return &usageError{err}
	}
	var err error
	if o.only, err = regexp.Compile(only); err != nil {
		return wrongUsage(stderr, "-only: %w", err)
	}
	if o.calls < o.goroutines || o.goroutines < 1 || o.rounds < 1 || o.tenants < 1 || flags.NArg() > 0 {
		return wrongUsage(stderr, "-calls must be at least -goroutines, all numbers at least 1, "+
			"and nothing may follow the flags")
	}
	check(load.check(ctx, stderr))
	return scenarioOptions{}.apart(func(ends scenarioOptions) {
		r := o.measureAll(ctx, startServer(ends, o.goroutines), stderr)
		if asJSON {
			check(printJSON(stdout, r))
		} else {
			check(r.print(stdout))
		}
	})
}

func (o options) measureAll(ctx context.Context, s *server, stderr io.Writer) *report {
	all := slices.DeleteFunc(contestants(s.client), func(c contestant) bool { return !o.only.MatchString(c.name) })
	if len(all) == 0 {
		fail("-only %q: no contestant has such a name", o.only)
	}
	base := baseline(s.client)
	all = append([]contestant{base}, all...)
	r := &report{Baseline: base.name, Calls: o.calls, Goroutines: o.goroutines, Rounds: o.rounds}
	for _, c := range all {
		for _, granted := range []bool{true, false} {
			r.Rows = append(r.Rows, row{Name: c.name, Limit: c.limit, Granted: granted})
		}
	}

	begin := time.Now()
	for round := range o.rounds {
		for i := range r.Rows {
			row := &r.Rows[i]
			if i%20 == 0 {
				fmt.Fprintf(stderr, "round %d of %d: %s\n", round+1, o.rounds, row.Name)
			}
			b := s.measure(ctx, base, row.Granted, o)
			c := s.measure(ctx, all[i/2], row.Granted, o)
			row.samples = append(row.samples, sample{
				time: c.server / b.server, cpu: c.cpu / b.cpu,
				throughput: b.took / c.took, inside: c.inside / float64(o.calls),
			})
		}
	}
	for i := range r.Rows {
		row := &r.Rows[i]
		row.ServerTime = medianOf(row.samples, func(s sample) float64 { return s.time })
		row.ServerCPU = medianOf(row.samples, func(s sample) float64 { return s.cpu })
		row.Throughput = medianOf(row.samples, func(s sample) float64 { return s.throughput })
		row.CallsInside = medianOf(row.samples, func(s sample) float64 { return s.inside })
		if row.Granted {
			s.memoryOf(ctx, all[i/2], o.tenants, row)
		} else {
			row.BytesATenant, row.TenantsFilled = r.Rows[i-1].BytesATenant, r.Rows[i-1].TenantsFilled
		}
	}
	fmt.Fprintf(stderr, "done in %v\n", time.Since(begin).Round(time.Second))
	return r
}

// spent is the cost of one measurement.
type spent struct {
	usage
	took float64 // seconds
}

// measure has many goroutines take units for tenants in turn. Before grants, the windows of each
// tenant are full but for the units to grant: 20, or 1/200 of a large limit.
func (s *server) measure(ctx context.Context, c contestant, granted bool, o options) spent {
	room := max(20, c.limit/200)
	tenants := (o.calls + room - 1) / room
	used := c.limit
	if granted {
		used -= room
	}
	state := s.fill(ctx, c, used)
	check(s.control.FlushAll(ctx).Err())
	s.restore(ctx, state, tenants)
	cpu := s.reset(ctx)
	begin := time.Now()
	var grants atomic.Int64
	inParallel(o.calls, o.goroutines, func(i int) {
		if c.take(ctx, tenantName(i%tenants), 1) {
			grants.Add(1)
		}
	})
	took := time.Since(begin).Seconds()
	if n, expected := int(grants.Load()), map[bool]int{true: o.calls}[granted]; n != expected {
		fail("%s: %d of %d calls granted, not %d: it does not count as assumed", c.name, n, o.calls, expected)
	}
	return spent{s.usage(ctx, cpu), took}
}

// template is the tenant that is filled once and then copied.
const template = "tenant-template"

func tenantName(i int) string { return fmt.Sprintf("tenant-%08d", i) }

// A stored value, as DUMP gives it.
type stored struct{ key, dump string }

// fill brings one tenant to `used` units and returns what is stored for it then. What a limiter
// keeps for a process and not for a tenant is apart.
func (s *server) fill(ctx context.Context, c contestant, used int) (state []stored) {
	check(s.control.FlushAll(ctx).Err())
	switch {
	case used == 0:
	case c.fill != nil:
		c.fill(ctx, template, used)
	default:
		c.take(ctx, template, used)
	}
	for _, key := range must(s.control.Keys(ctx, "*"+template+"*").Result()) {
		state = append(state, stored{key, must(s.control.Dump(ctx, key).Result())})
	}
	return state
}

func (s *server) restore(ctx context.Context, values []stored, tenants int) {
	pipe := s.control.Pipeline()
	size := 0
	for i := range tenants {
		for _, v := range values {
			pipe.Restore(ctx, strings.ReplaceAll(v.key, template, tenantName(i)), period, v.dump)
			size += len(v.key) + len(v.dump)
		}
		if size > 1<<20 || i == tenants-1 {
			must(pipe.Exec(ctx))
			size = 0
		}
	}
}

// memoryOf measures the memory of a tenant with full windows.
func (s *server) memoryOf(ctx context.Context, c contestant, tenants int, to *row) {
	state := s.fill(ctx, c, c.limit)
	one := int64(0)
	for _, v := range state {
		one += must(s.control.MemoryUsage(ctx, v.key).Result())
	}
	to.TenantsFilled = min(tenants, max(1, int(256<<20/one)))
	check(s.control.FlushAll(ctx).Err())
	before := s.memory(ctx)
	s.restore(ctx, state, to.TenantsFilled)
	to.BytesATenant = (s.memory(ctx) - before) / int64(to.TenantsFilled)
}

func (r *report) print(w io.Writer) error {
	fmt.Fprintf(w, "Ratios to %q of the same outcome, measured right before; "+
		"medians of %d rounds of %d decisions, %d goroutines.\n\n", r.Baseline, r.Rounds, r.Calls, r.Goroutines)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\tserver time\tserver CPU\tthroughput\tredis.calls\tbytes a tenant\t")
	for _, row := range r.Rows {
		outcome := "denied"
		if row.Granted {
			outcome = "granted"
		}
		fmt.Fprintf(t, "%s, %s\t%.2f\t%.2f\t%.2f\t%.1f\t%d\t\n",
			row.Name, outcome, row.ServerTime, row.ServerCPU, row.Throughput, row.CallsInside, row.BytesATenant)
	}
	check(t.Flush())
	fmt.Fprintln(w, "\nLess is better for server time and CPU, more for throughput. Bytes a tenant: windows full.")
	return nil
}

func medianOf(samples []sample, value func(sample) float64) float64 {
	values := make([]float64, len(samples))
	for i, s := range samples {
		values[i] = value(s)
	}
	return median(values)
}
