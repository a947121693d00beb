package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
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
		return wrongUsage(stderr, "-calls must be at least -goroutines, all numbers at least 1, and nothing may follow the flags")
	}
	if err := load.check(ctx, stderr); err != nil {
		return err
	}
	s, err := startServer(o.goroutines)
	if err != nil {
		return err
	}
	defer s.stop()
	r, err := measureAll(ctx, s, o, stderr)
	if err != nil {
		return err
	}
	if asJSON {
		e := json.NewEncoder(stdout)
		e.SetIndent("", "  ")
		return e.Encode(r)
	}
	return r.print(stdout)
}

func measureAll(ctx context.Context, s *server, o options, stderr io.Writer) (*report, error) {
	all, err := contestants(s.client)
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(c contestant) bool { return !o.only.MatchString(c.name) })
	if len(all) == 0 {
		return nil, fmt.Errorf("-only %q: no contestant has such a name", o.only)
	}
	base := baseline(s.client)
	r := &report{Baseline: base.name, Calls: o.calls, Goroutines: o.goroutines, Rounds: o.rounds}
	for _, c := range append([]contestant{base}, all...) {
		for _, granted := range []bool{true, false} {
			r.Rows = append(r.Rows, row{Name: c.name, Limit: c.limit, Granted: granted})
		}
	}
	all = append([]contestant{base}, all...)

	begin := time.Now()
	progress := newProgress(stderr, o.rounds*len(r.Rows))
	for range o.rounds {
		for i := range r.Rows {
			row := &r.Rows[i]
			progress.step(row.Name)
			b, err := s.measure(ctx, base, row.Granted, o)
			if err != nil {
				return nil, err
			}
			c, err := s.measure(ctx, all[i/2], row.Granted, o)
			if err != nil {
				return nil, err
			}
			row.samples = append(row.samples, sample{
				time: c.server / b.server, cpu: c.cpu / b.cpu, throughput: b.took / c.took, inside: c.inside / float64(o.calls),
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
			progress.say("memory: " + row.Name)
			if err := s.memoryOf(ctx, all[i/2], o.tenants, row); err != nil {
				return nil, err
			}
		} else {
			row.BytesATenant, row.TenantsFilled = r.Rows[i-1].BytesATenant, r.Rows[i-1].TenantsFilled
		}
	}
	progress.say(fmt.Sprintf("done in %v\n", time.Since(begin).Round(time.Second)))
	return r, nil
}

// spent is the cost of one measurement.
type spent struct {
	usage
	took float64 // seconds
}

// measure has many goroutines take units for tenants in turn. Before grants, the windows of each
// tenant are full but for the units to grant: 20, or 1/200 of a large limit.
func (s *server) measure(ctx context.Context, c contestant, granted bool, o options) (spent, error) {
	room := max(20, c.limit/200)
	tenants := (o.calls + room - 1) / room
	used := c.limit
	if granted {
		used -= room
	}
	state, err := s.fill(ctx, c, used)
	if err != nil {
		return spent{}, err
	}
	if err := s.control.FlushAll(ctx).Err(); err != nil {
		return spent{}, err
	}
	if err := s.restore(ctx, state, tenants); err != nil {
		return spent{}, err
	}
	cpu, err := s.reset(ctx)
	if err != nil {
		return spent{}, err
	}
	begin := time.Now()
	grants, err := ask(ctx, c, tenants, o)
	took := time.Since(begin).Seconds()
	if err != nil {
		return spent{}, fmt.Errorf("%s: %w", c.name, err)
	}
	if expected := map[bool]int{true: o.calls}[granted]; grants != expected {
		return spent{}, fmt.Errorf("%s: %d of %d calls granted, not %d: it does not count as assumed", c.name, grants, o.calls, expected)
	}
	u, err := s.usage(ctx, cpu)
	return spent{u, took}, err
}

func ask(ctx context.Context, c contestant, tenants int, o options) (grants int, err error) {
	var next, granted atomic.Int64
	var once sync.Once
	var wg sync.WaitGroup
	for range o.goroutines {
		wg.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= o.calls {
					return
				}
				ok, e := c.take(ctx, tenantName(i%tenants))
				if e != nil {
					once.Do(func() { err = e })
					return
				}
				if ok {
					granted.Add(1)
				}
			}
		})
	}
	wg.Wait()
	return int(granted.Load()), err
}

// template is the tenant that is filled once and then copied.
const template = "tenant-template"

func tenantName(i int) string { return fmt.Sprintf("tenant-%08d", i) }

// A stored value, as DUMP gives it.
type stored struct{ key, dump string }

// fill brings one tenant to `used` units and returns what is stored for it then. What a limiter
// keeps for a process and not for a tenant is apart.
func (s *server) fill(ctx context.Context, c contestant, used int) (state []stored, err error) {
	if err := s.control.FlushAll(ctx).Err(); err != nil {
		return nil, err
	}
	if used > 0 {
		if err := c.fill(ctx, template, used); err != nil {
			return nil, err
		}
	}
	keys, err := s.control.Keys(ctx, "*"+template+"*").Result()
	if err != nil {
		return nil, err
	}
	for _, key := range keys {
		dump, err := s.control.Dump(ctx, key).Result()
		if err != nil {
			return nil, err
		}
		state = append(state, stored{key, dump})
	}
	return state, nil
}

func (s *server) restore(ctx context.Context, values []stored, tenants int) error {
	pipe := s.control.Pipeline()
	size := 0
	for i := range tenants {
		for _, v := range values {
			pipe.Restore(ctx, strings.ReplaceAll(v.key, template, tenantName(i)), period, v.dump)
			size += len(v.key) + len(v.dump)
		}
		if size > 1<<20 || i == tenants-1 {
			if _, err := pipe.Exec(ctx); err != nil {
				return err
			}
			size = 0
		}
	}
	return nil
}

// memoryOf measures the memory of a tenant with full windows.
func (s *server) memoryOf(ctx context.Context, c contestant, tenants int, to *row) error {
	state, err := s.fill(ctx, c, c.limit)
	if err != nil {
		return err
	}
	one := int64(0)
	for _, v := range state {
		bytes, err := s.control.MemoryUsage(ctx, v.key).Result()
		if err != nil {
			return err
		}
		one += bytes
	}
	to.TenantsFilled = min(tenants, max(1, int(256<<20/one)))
	to.BytesATenant, err = s.memoryFor(ctx, state, to.TenantsFilled)
	return err
}

// memoryFor returns bytes per tenant.
func (s *server) memoryFor(ctx context.Context, values []stored, tenants int) (int64, error) {
	if err := s.control.FlushAll(ctx).Err(); err != nil {
		return 0, err
	}
	before, err := s.memory(ctx)
	if err != nil {
		return 0, err
	}
	if err := s.restore(ctx, values, tenants); err != nil {
		return 0, err
	}
	after, err := s.memory(ctx)
	return (after - before) / int64(tenants), err
}

func (r *report) print(w io.Writer) error {
	fmt.Fprintf(w, "Ratios to %q of the same outcome, measured right before; medians of %d rounds of %d decisions, %d goroutines.\n\n",
		r.Baseline, r.Rounds, r.Calls, r.Goroutines)
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
	if err := t.Flush(); err != nil {
		return err
	}
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

// progress prints one line that changes on a terminal, elsewhere a few lines.
type progress struct {
	w        io.Writer
	terminal bool
	done, of int
}

func newProgress(w io.Writer, of int) *progress {
	p := &progress{w: w, of: of}
	if f, ok := w.(*os.File); ok {
		info, err := f.Stat()
		p.terminal = err == nil && info.Mode()&os.ModeCharDevice != 0
	}
	return p
}

func (p *progress) step(what string) {
	p.done++
	if p.terminal || p.done%20 == 1 {
		p.say(fmt.Sprintf("%d/%d %s", p.done, p.of, what))
	}
}

func (p *progress) say(what string) {
	if p.terminal {
		fmt.Fprintf(p.w, "\r\x1b[K%s", what)
	} else {
		fmt.Fprintln(p.w, strings.TrimSuffix(what, "\n"))
	}
}
