package policyfile

import (
	"fmt"
	"slices"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/sluice-go/sluice/throttle"
)

// A File is everything that a policy file holds.
type File struct {
	Policies []throttle.Policy
	Batches  []Batch
}

// A Batch is an entry under the key "batches", as it is written. Package worker/batchfile knows what
// may stand in its fields. Those that the file leaves out are zero.
type Batch struct {
	Ended        string
	FinishBy     string
	Hours        Hours
	Late         string
	Missed       string
	MissedWithin time.Duration
	Name         string
	Queue        string
	Schedule     string
	Tasks        BatchTasks
	Tenants      []string
	TenantsFile  string
	Timezone     string

	object
}

// Hours are the key "hours" of a batch.
type Hours struct {
	From, To string
	Stop     bool
}

// BatchTasks are the key "tasks" of a batch.
type BatchTasks struct {
	Cost      map[string]int64
	Count     int64
	File      string
	MaxRetry  *int // nil if left out
	Payload   string
	Retention time.Duration
	Timeout   time.Duration
	Type      string
}

// Bad returns an *Error about a field of the batch, such as "schedule".
func (b Batch) Bad(field, hint string) error {
	f, ok := b.fields[field]
	if !ok {
		return &Error{b.file, b.line, b.where, field + " is missing", hint}
	}
	return &Error{b.file, f.line, b.where, field + " " + show(f.node), hint}
}

// ParseFile is Parse for files whose batches are needed too.
func ParseFile(name string, data []byte) (File, error) {
	d := &decoder{file: name}
	var f File
	if root := d.document(data); root != nil {
		file := d.object(root, root.Line, "", "document", "{policies: [...]}", "policies", "batches")
		f = File{d.policies(file), d.batches(file)}
	}
	if len(d.errs) > 0 {
		return File{}, d.join()
	}
	return f, nil
}

func (d *decoder) batches(file object) []Batch {
	var batches []Batch
	for i, n := range file.list("batches", "must be a list of batches") {
		b := d.batch(n, label("batch", n, i))
		if j := slices.IndexFunc(batches, func(other Batch) bool { return other.Name == b.Name && b.Name != "" }); j >= 0 {
			b.bad("name", fmt.Sprintf("is taken by the batch on line %d: batches have different names", batches[j].line))
		}
		batches = append(batches, b)
	}
	return batches
}

func (d *decoder) batch(n *yaml.Node, where string) Batch {
	o := d.object(n, n.Line, where, "", `{name: nightly, schedule: "0 2 * * *", tenants: [...], tasks: {...}}`,
		"name", "schedule", "timezone", "tenants", "tenants_file", "tasks",
		"queue", "hours", "finish_by", "late", "missed", "missed_within", "ended")
	b := Batch{
		Ended: o.text("ended"), FinishBy: o.text("finish_by"), Late: o.text("late"), Missed: o.text("missed"),
		MissedWithin: o.duration("missed_within"), Name: o.text("name"),
		Queue: o.text("queue"), Schedule: o.text("schedule"), Tenants: o.texts("tenants"),
		TenantsFile: o.text("tenants_file"), Timezone: o.text("timezone"), object: o,
	}
	before := len(d.errs)
	hours := o.child("hours", where+", hours", "", `{from: "22:00", to: "06:00"}`, "from", "to", "stop")
	b.Hours = Hours{hours.text("from"), hours.text("to"), hours.flag("stop")}
	if _, given := o.fields["hours"]; given && len(d.errs) == before {
		hours.must("from")
		hours.must("to")
	}
	before = len(d.errs)
	tasks := o.child("tasks", where+", tasks", "", `{type: "geocode:address", count: 1000}`,
		"type", "count", "payload", "file", "cost", "max_retry", "retention", "timeout")
	b.Tasks = BatchTasks{
		Cost: tasks.costs("cost"), Count: tasks.units("count"), File: tasks.text("file"), Payload: tasks.text("payload"),
		Retention: tasks.duration("retention"), Timeout: tasks.duration("timeout"), Type: tasks.text("type"),
	}
	if retries, ok := tasks.whole("max_retry", 0, 1000); ok {
		b.Tasks.MaxRetry = new(int(retries))
	}
	o.must("name")
	if o.must("tasks") && len(d.errs) == before {
		tasks.must("type")
	}
	_, list := o.fields["tenants"]
	_, inFile := o.fields["tenants_file"]
	switch {
	case list && inFile:
		o.bad("tenants_file", "must not be given beside tenants")
	case !list && !inFile:
		d.report(o.line, where, "tenants is missing", "must be a list of tenants, or give tenants_file")
	}
	for _, key := range []string{"count", "payload"} {
		if _, ok := tasks.fields[key]; ok && tasks.fields["file"].node != nil {
			tasks.bad(key, "must not be given beside file: each line of the file is the payload of a task")
		}
	}
	return b
}

func (o object) must(key string) bool {
	if _, ok := o.fields[key]; ok {
		return true
	}
	o.report(o.line, o.where, key+" is missing", "must be given")
	return false
}

// costs reads a field whose keys are units.
func (o object) costs(key string) map[string]int64 {
	all := o.child(key, o.where+", "+key, "", "{requests: 1}")
	var costs map[string]int64
	for _, unit := range all.keys {
		if costs == nil {
			costs = map[string]int64{}
		}
		costs[unit] = all.units(unit)
	}
	return costs
}
