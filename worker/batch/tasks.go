package batch

import (
	"bytes"
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"text/template"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/worker"
)

// Tenants yields the tenants of a firing. A tenant that comes twice is an error. Tenants is called once for each
// firing, as Redis keeps the list, and once for each plan. After an error or a panic it is called again later.
type Tenants func(ctx context.Context, f Firing) iter.Seq2[string, error]

// Tasks yields the tasks of one tenant of a firing. They are never all in memory. Tasks is called once to count them
// for the plan, and once to enqueue them. After a pause, an error or a crash it is called again, and as many tasks
// as were enqueued are skipped: so it must yield the same tasks in the same order.
type Tasks func(ctx context.Context, f Firing, tenant string) iter.Seq2[*asynq.Task, error]

// List is Tenants for a list of names.
func List(tenants ...string) Tenants {
	return func(context.Context, Firing) iter.Seq2[string, error] {
		return func(yield func(string, error) bool) {
			for _, tenant := range tenants {
				if !yield(tenant, nil) {
					return
				}
			}
		}
	}
}

// A Template makes the tasks of a tenant that are alike.
type Template struct {
	Cost    map[string]int64 // per unit; the default is 1 of throttle.Requests
	Count   int              // for each tenant; the default is 1
	Payload string           // a text/template of {{.Tenant}}, {{.Number}} from 1 on, {{.Tick}} and {{.Batch}}
	Type    string           // required
}

// Tasks returns the template's Tasks. An error says that the type is blank, a number is below 0, or the payload is no
// text/template or fails with sample values.
func (t Template) Tasks() (Tasks, error) {
	if strings.TrimSpace(t.Type) == "" {
		return nil, fmt.Errorf("batch: type %q: must be the type of a task", t.Type)
	}
	if t.Count < 0 {
		return nil, fmt.Errorf("batch: count %d: must not be below 0", t.Count)
	}
	for _, unit := range slices.Sorted(maps.Keys(t.Cost)) {
		if n := t.Cost[unit]; n < 0 {
			return nil, fmt.Errorf("batch: cost %d of unit %q: must not be below 0", n, unit)
		}
	}
	text, err := template.New("payload").Option("missingkey=error").Parse(t.Payload)
	if err != nil {
		return nil, fmt.Errorf("batch: payload %q: %w", t.Payload, err)
	}
	type values struct {
		Batch, Tenant, Tick string
		Number              int
	}
	payload := func(v values) ([]byte, error) {
		var out bytes.Buffer
		err := text.Execute(&out, v)
		return out.Bytes(), err
	}
	if _, err := payload(values{strings.Repeat("x", 64), strings.Repeat("x", 64), "2006-01-02T15:04:05Z", 1}); err != nil {
		return nil, fmt.Errorf("batch: payload %q: %w", t.Payload, err)
	}
	return func(_ context.Context, f Firing, tenant string) iter.Seq2[*asynq.Task, error] {
		return func(yield func(*asynq.Task, error) bool) {
			for n := range max(1, t.Count) {
				text, err := payload(values{f.Batch, tenant, f.Tick.UTC().Format("2006-01-02T15:04:05Z"), n + 1})
				task := worker.NewTask(worker.Identity{Cost: t.Cost, Tenant: tenant}, t.Type, text)
				if !yield(task, err) || err != nil {
					return
				}
			}
		}
	}, nil
}
