package policyfile

import (
	"strconv"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/sluice-go/sluice/throttle/internal/quote"
)

// A Batch is an item under the key "batches", as it is written. Fields that the file leaves out are zero. Package
// worker/batchfile checks the values of the fields that are given.
type Batch struct {
	Duration     time.Duration
	Ended        string
	FinishBy     string
	Hours        Hours
	Late         string
	Missed       string
	MissedWithin time.Duration
	Name         string
	OnFailed     string
	Overlap      string
	Queue        string
	Schedule     string
	Tasks        BatchTasks
	Tenants      []string
	TenantsFile  string
	Timezone     string

	object *object
}

// Hours are the key "hours" of a batch.
type Hours struct{ From, To string }

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

// Bad returns an *Error about a field of the batch, such as "schedule". The error shows what the file has for the
// field; for a mapping it shows the value given, if that is text.
func (b Batch) Bad(field string, value any, hint string) error {
	o := b.object
	f, ok := o.fields[field]
	if !ok {
		return &Error{o.file, o.line, o.path, field + " is missing", hint}
	}
	shown := show(f.node)
	if text, ok := value.(string); ok && follow(f.node).Kind == yaml.MappingNode {
		shown = strconv.Quote(quote.Short(text))
	}
	return &Error{o.file, f.line, o.path, field + " " + shown, hint}
}

// checkBatch reports missing keys, and keys that exclude each other.
func (o *object) checkBatch(b Batch) {
	o.must("name")
	if o.must("tasks") {
		o.kids["tasks"].must("type")
	}
	for i, d := range []time.Duration{b.Tasks.Retention, b.Tasks.Timeout} {
		if d != 0 && d < time.Second {
			o.kids["tasks"].reportKey([]string{"retention", "timeout"}[i], "must be at least 1s")
		}
	}
	if hours := o.kids["hours"]; hours != nil {
		hours.must("from")
		hours.must("to")
	}
	switch _, inFile := o.fields["tenants_file"]; {
	case inFile && b.Tenants != nil:
		o.reportKey("tenants_file", "must not be given beside tenants")
	case !inFile && o.fields["tenants"].node == nil:
		o.report(o.line, "tenants is missing", "must be a list of tenants, or give tenants_file")
	}
	for _, key := range []string{"count", "payload"} {
		tasks := o.kids["tasks"]
		if tasks != nil && tasks.fields[key].node != nil && tasks.fields["file"].node != nil {
			tasks.reportKey(key, "must not be given beside file: each line of the file is the payload of a task")
		}
	}
}

// must reports a missing key, and returns whether it is there.
func (o *object) must(key string) bool {
	_, ok := o.fields[key]
	if !ok && !o.broken {
		o.report(o.line, key+" is missing", "must be given")
	}
	return ok
}
