// Package batchfile reads batches from the key "batches" of a policy file. It is as strict as package policyfile, and
// returns that package's errors. docs/reference/batches.md describes the format.
package batchfile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/policyfile"
	"github.com/sluice-go/sluice/worker/batch"
)

// Load reads a policy file with batches. Errors are Parse's, and wrapped errors of reading the file.
func Load(path string) ([]throttle.Policy, []batch.Batch, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, fmt.Errorf("batchfile: %w", err)
	}
	return Parse(path, data)
}

// Parse parses the text of a policy file, and returns valid policies and batches in the order of the file. Messages
// call the file by its name. Files that the text names must exist; relative paths begin at the policy file's folder.
// The error joins *policyfile.Errors: all of policyfile.ParseFile's or, if it has none, the first of each batch.
func Parse(name string, data []byte) ([]throttle.Policy, []batch.Batch, error) {
	f, err := policyfile.ParseFile(name, data)
	if err != nil {
		return nil, nil, err
	}
	var batches []batch.Batch
	var errs []error
	for _, from := range f.Batches {
		b, err := read(filepath.Dir(name), from, f.Policies)
		batches, errs = append(batches, b), append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, nil, err
	}
	return f.Policies, batches, nil
}

func read(dir string, from policyfile.Batch, policies []throttle.Policy) (batch.Batch, error) {
	b := batch.Batch{
		Duration:     from.Duration,
		Ended:        from.Ended,
		FinishBy:     from.FinishBy,
		Hours:        batch.Hours(from.Hours),
		Late:         batch.Late(from.Late),
		Missed:       batch.Missed(from.Missed),
		MissedWithin: from.MissedWithin,
		Name:         from.Name,
		OnFailed:     from.OnFailed,
		Overlap:      batch.Overlap(from.Overlap),
		Queue:        from.Queue,
		Schedule:     from.Schedule,
		Tenants:      batch.List(from.Tenants...),
		Timezone:     from.Timezone,
	}
	seen := map[string]bool{}
	for _, tenant := range from.Tenants {
		if seen[tenant] {
			return b, from.Bad("tenants", nil, fmt.Sprintf("tenant %q: must not come twice", tenant))
		}
		seen[tenant] = true
	}
	if from.TenantsFile != "" {
		path, err := find(dir, from.TenantsFile)
		if err != nil {
			return b, from.Bad("tenants_file", nil, err.Error())
		}
		b.Tenants = tenantsOf(path)
	}
	tasks := from.Tasks
	i := slices.IndexFunc(policies, func(p throttle.Policy) bool { return p.Matches(tasks.Type) })
	if i < 0 || policies[i].EarliestReset {
		return b, from.Bad("tasks", nil, fmt.Sprintf("type %q: must match a policy without earliest_reset", tasks.Type))
	}
	if tasks.File != "" {
		path, err := find(dir, tasks.File)
		if err != nil {
			return b, from.Bad("tasks", nil, "file: "+err.Error())
		}
		b.Tasks = tasksOf(path, tasks.Type, tasks.Cost)
	} else {
		all, err := batch.Template{
			Cost: tasks.Cost, Count: int(tasks.Count), Payload: tasks.Payload, Type: tasks.Type,
		}.Tasks()
		if err != nil {
			return b, from.Bad("tasks", nil, err.Error())
		}
		b.Tasks = all
	}
	if tasks.MaxRetry != nil {
		b.Options = append(b.Options, asynq.MaxRetry(*tasks.MaxRetry))
	}
	if tasks.Retention > 0 {
		b.Options = append(b.Options, asynq.Retention(tasks.Retention))
	}
	if tasks.Timeout > 0 {
		b.Options = append(b.Options, asynq.Timeout(tasks.Timeout))
	}
	if e, ok := errors.AsType[*batch.Error](b.Validate()); ok {
		return b, from.Bad(e.Field, e.Value, e.Hint)
	}
	return b, nil
}

// find returns the path of a file that a policy file in dir mentions.
func find(dir, path string) (string, error) {
	if !filepath.IsAbs(path) {
		path = filepath.Join(dir, path)
	}
	info, err := os.Stat(path)
	if err == nil && info.IsDir() {
		err = fmt.Errorf("%s is a folder: must be a file", path)
	}
	return path, err
}
