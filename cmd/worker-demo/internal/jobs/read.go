package jobs

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/sluice-go/sluice/internal/suggest"
)

// mostErrors bounds how many bad lines are reported at once.
const mostErrors = 10

// Read reads one job per line; empty lines are skipped. The error names every bad line (the
// first mostErrors of them), with a hint.
func Read(name string, r io.Reader) ([]Job, error) {
	var jobs []Job
	var errs []error
	first := map[string]string{} // id -> where it stands
	lines := bufio.NewReader(r)
	for number := 1; ; number++ {
		line, err := lines.ReadBytes('\n')
		if err != nil && err != io.EOF {
			return nil, fmt.Errorf("%s:%d: %w", name, number, err)
		}
		if line = bytes.TrimSpace(line); len(line) > 0 {
			at := fmt.Sprintf("%s:%d", name, number)
			job, jobErr := parseJob(line)
			job.At = at
			if job.ID == "" {
				job.ID = fmt.Sprintf("%d-%x", number, sha256.Sum256(line))[:24]
			}
			if other, taken := first[job.ID]; taken && jobErr == nil {
				jobErr = fmt.Errorf("id %q: is taken by %s: every job has an id of its own", job.ID, other)
			}
			first[job.ID] = at
			if jobErr != nil {
				errs = append(errs, fmt.Errorf("%s: %w", at, jobErr))
			}
			jobs = append(jobs, job)
		}
		if err == io.EOF {
			return jobs, Join(errs)
		}
	}
}

// Join makes one error of many, at most mostErrors of them word for word.
func Join(errs []error) error {
	if more := len(errs) - mostErrors; more > 0 {
		errs = append(errs[:mostErrors:mostErrors], fmt.Errorf("and %d more bad lines", more))
	}
	return errors.Join(errs...)
}

// A field is a key that a job's line may hold.
type field struct {
	name   string
	hint   string
	target func(*Job) any
}

func jobFields() []field {
	return []field{
		{"id", "must be a string", func(j *Job) any { return &j.ID }},
		{"tenant", "must be a string", func(j *Job) any { return &j.Tenant }},
		{"method", `must be a string such as "POST"`, func(j *Job) any { return &j.Method }},
		{"url", "must be a string", func(j *Job) any { return &j.URL }},
		{"headers", `must be an object of strings, such as {"Accept": "text/html"}`, func(j *Job) any { return &j.Headers }},
		{"body", "must be a string", func(j *Job) any { return &j.Body }},
		{"cost", `must be a whole number, or an object of whole numbers such as {"tokens": 1500}`, func(j *Job) any { return &j.Cost }},
		{"max_retry", "must be a whole number", func(j *Job) any { return &j.MaxRetry }},
		{"type", "must be a string", func(j *Job) any { return &j.Type }},
	}
}

func parseJob(line []byte) (Job, error) {
	job := Job{MaxRetry: DefaultMaxRetry, Method: defaultMethod, Type: defaultType}
	fields := jobFields()
	seen, hasID := map[string]bool{}, false
	err := eachMember(line, func(name string, value json.RawMessage) error {
		i := slices.IndexFunc(fields, func(f field) bool { return f.name == name })
		if i < 0 {
			return fmt.Errorf("unknown field %q: %s", name, suggestField(name, fields))
		}
		if seen[name] {
			return fmt.Errorf("field %q: is there twice: must be there once", name)
		}
		seen[name] = true
		if string(value) == "null" {
			return nil
		}
		hasID = hasID || name == "id"
		if err := json.Unmarshal(value, fields[i].target(&job)); err != nil {
			return fmt.Errorf("%s %s: %s", name, Shorten(string(value)), fields[i].hint)
		}
		return nil
	})
	if err != nil {
		return job, err
	}
	return job, job.validate(hasID)
}

// eachMember calls f for the members of a JSON object in their order. encoding/json would take
// "URL" for "url", and the last of two.
func eachMember(line []byte, f func(name string, value json.RawMessage) error) error {
	var whole json.RawMessage
	if err := json.Unmarshal(line, &whole); err != nil {
		return fmt.Errorf("is not JSON: %w: must be one object on one line", err)
	}
	if line[0] != '{' {
		return fmt.Errorf(`%s: must be an object such as {"tenant": "acme", "url": "https://example.com/"}`, Shorten(string(line)))
	}
	d := json.NewDecoder(bytes.NewReader(line))
	d.Token() // the brace: the line is known to be a valid object
	for d.More() {
		name, _ := d.Token()
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return err
		}
		if err := f(name.(string), value); err != nil {
			return err
		}
	}
	return nil
}

func suggestField(name string, fields []field) string {
	var names []string
	for _, f := range fields {
		names = append(names, f.name)
	}
	if near := suggest.Nearest(name, names); near != "" {
		return fmt.Sprintf("did you mean %q?", near)
	}
	return "must be one of " + strings.Join(names, ", ")
}

// Shorten keeps a message readable whatever a line holds.
func Shorten(s string) string {
	if len(s) > 80 {
		return s[:80] + "..."
	}
	return s
}
