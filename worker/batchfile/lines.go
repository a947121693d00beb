package batchfile

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"os"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/batch"
)

// tenantsOf returns the tenants of a file with one name a line. Empty lines, and lines that begin with #, are left out.
func tenantsOf(path string) batch.Tenants {
	return func(context.Context, batch.Firing) iter.Seq2[string, error] {
		return func(yield func(string, error) bool) {
			for line, err := range lines(path) {
				if line = bytes.Trim(bytes.TrimSpace(line), "\ufeff"); err == nil && (len(line) == 0 || line[0] == '#') {
					continue
				}
				if !yield(string(line), err) || err != nil {
					return
				}
			}
		}
	}
}

// tasksOf returns the tasks of a file with one JSON value a line. Each is the payload of one task, for every tenant. A
// line that is an object with the field "tenant" is for that tenant only.
func tasksOf(path, taskType string, cost map[string]int64) batch.Tasks {
	return func(_ context.Context, _ batch.Firing, tenant string) iter.Seq2[*asynq.Task, error] {
		return func(yield func(*asynq.Task, error) bool) {
			n := 0
			for line, err := range lines(path) {
				n++
				if len(bytes.TrimSpace(line)) == 0 && err == nil {
					continue
				}
				if err == nil && !json.Valid(line) {
					err = fmt.Errorf("batchfile: %s:%d: must be one JSON value", path, n)
				}
				row, owner := map[string]json.RawMessage{}, tenant
				_ = json.Unmarshal(line, &row) // it stays empty if the line is no object
				if whose := row["tenant"]; err == nil && whose != nil && (string(whose) == "null" || json.Unmarshal(whose, &owner) != nil) {
					err = fmt.Errorf("batchfile: %s:%d: tenant: must be text", path, n)
				}
				if err == nil && owner != tenant {
					continue
				}
				task := worker.NewTask(worker.Identity{Cost: cost, Tenant: tenant}, taskType, bytes.Clone(line))
				if !yield(task, err) || err != nil {
					return
				}
			}
		}
	}
}

func lines(path string) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		file, err := os.Open(path)
		if err != nil {
			yield(nil, fmt.Errorf("batchfile: %w", err))
			return
		}
		defer file.Close()
		scanner := bufio.NewScanner(file)
		scanner.Buffer(nil, 1<<20) // the longest line
		for scanner.Scan() {
			if !yield(scanner.Bytes(), nil) {
				return
			}
		}
		if err := scanner.Err(); err != nil {
			yield(nil, fmt.Errorf("batchfile: %s: %w", path, err))
		}
	}
}
