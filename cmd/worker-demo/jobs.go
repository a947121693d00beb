package main

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/sluice-go/sluice/internal/suggest"
	"github.com/sluice-go/sluice/throttle"
)

// A Job is one line of a jobs file: one HTTP call, made for one tenant.
type Job struct {
	Body     string            `json:"body,omitempty"`
	Cost     Cost              `json:"cost,omitempty"`
	Headers  map[string]string `json:"headers,omitempty"`
	ID       string            `json:"id"`
	MaxRetry int               `json:"max_retry"`
	Method   string            `json:"method"`
	Tenant   string            `json:"tenant"`
	Type     string            `json:"type"`
	URL      string            `json:"url"`

	at    string // "jobs.jsonl:12", for messages
	plain bool   // enqueued by an asynq.Client that knows of no line
}

// A Cost is what a job takes, per unit. In JSON it is an object, or a number of requests.
type Cost map[string]int64

func (c *Cost) UnmarshalJSON(data []byte) error {
	var requests int64
	if err := json.Unmarshal(data, &requests); err == nil {
		*c = Cost{throttle.Requests: requests}
		return nil
	}
	return json.Unmarshal(data, (*map[string]int64)(c))
}

// What a job has unless its line says otherwise.
const (
	defaultMaxRetry = 3
	defaultMethod   = http.MethodGet
	defaultType     = "http:call"
)

// mostJobErrors bounds how many bad lines are reported at once.
const mostJobErrors = 10

// ReadJobs reads one job per line; empty lines are skipped. The error names every bad line (the
// first mostJobErrors of them), with a hint.
func ReadJobs(name string, r io.Reader) ([]Job, error) {
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
			job.at = at
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
			return jobs, joinFirst(errs)
		}
	}
}

// joinFirst makes one error of many, at most mostJobErrors of them word for word.
func joinFirst(errs []error) error {
	if more := len(errs) - mostJobErrors; more > 0 {
		errs = append(errs[:mostJobErrors:mostJobErrors], fmt.Errorf("and %d more bad lines", more))
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
	job := Job{MaxRetry: defaultMaxRetry, Method: defaultMethod, Type: defaultType}
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
			return fmt.Errorf("%s %s: %s", name, shorten(string(value)), fields[i].hint)
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
		return fmt.Errorf(`%s: must be an object such as {"tenant": "acme", "url": "https://example.com/"}`, shorten(string(line)))
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

// validate checks what can be told without the policies.
func (j *Job) validate(hasID bool) error {
	if hasID && (strings.TrimSpace(j.ID) == "" || len(j.ID) > throttle.MaxValueBytes) {
		return fmt.Errorf("id %q: must be 1 to %d bytes, not only blanks", shorten(j.ID), throttle.MaxValueBytes)
	}
	if j.Tenant == "" {
		return errors.New("tenant is missing: must name for whom the call is made")
	}
	if j.URL == "" {
		return errors.New("url is missing: must be what to call")
	}
	if u, err := url.Parse(j.URL); err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return fmt.Errorf("url %q: must be absolute, with http:// or https://", shorten(j.URL))
	}
	if j.MaxRetry < 0 {
		return fmt.Errorf("max_retry %d: must be 0 or more", j.MaxRetry)
	}
	if strings.TrimSpace(j.Type) == "" {
		return fmt.Errorf("type %q: must not be blank", j.Type)
	}
	if !isToken(j.Method) {
		return fmt.Errorf("method %q: must be one word such as GET", shorten(j.Method))
	}
	for name, value := range j.Headers {
		if !isToken(name) {
			return fmt.Errorf("headers: name %q: must be one word such as Accept", shorten(name))
		}
		if strings.ContainsFunc(value, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }) {
			return fmt.Errorf("headers: %s %q: must not contain control characters", name, shorten(value))
		}
	}
	return nil
}

// isToken reports whether s is what RFC 9110 (5.6.2) allows as a method or a header's name.
func isToken(s string) bool {
	for i := range len(s) {
		c := s[i]
		if c <= ' ' || c >= 0x7f || strings.IndexByte(`"(),/:;<=>?@[\]{}`, c) >= 0 {
			return false
		}
	}
	return s != ""
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

// shorten keeps a message readable whatever a line holds.
func shorten(s string) string {
	if len(s) > 80 {
		return s[:80] + "..."
	}
	return s
}
