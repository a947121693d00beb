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

	"github.com/sluice-go/sluice/cmd/sluice/internal/environ"
	"github.com/sluice-go/sluice/throttle/policyfile"
)

// mostErrors is the number of bad lines that are reported at once.
const mostErrors = 10

// Read reads one job from each line that is not empty. The error names the bad lines, each with a hint. Messages call
// the file by name. Headers may refer to variables of env.
func Read(name string, r io.Reader, env environ.Lookup) ([]Job, error) {
	var jobs []Job
	var errs []error
	taken := map[string]string{} // by id: the line that has it
	lines := bufio.NewReader(r)
	for number, last := 1, false; !last; number++ {
		spot := fmt.Sprintf("%s:%d", name, number)
		line, err := lines.ReadBytes('\n')
		last = err == io.EOF
		if err != nil && !last {
			return nil, fmt.Errorf("%s: %w", spot, err)
		}
		if line = bytes.TrimSpace(line); len(line) == 0 {
			continue
		}
		job, err := parseJob(line, env)
		job.At = spot
		if job.ID == "" {
			job.ID = fmt.Sprintf("%d-%x", number, sha256.Sum256(line))[:24]
		}
		if other := taken[job.ID]; other != "" && err == nil {
			err = fmt.Errorf("id %q: is taken by %s: every job has an id of its own", job.ID, other)
		}
		taken[job.ID] = spot
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", spot, err))
		}
		jobs = append(jobs, job)
	}
	return jobs, Join(errs)
}

// Join joins the errors of lines. Of more than mostErrors it only counts the rest.
func Join(errs []error) error {
	if more := len(errs) - mostErrors; more > 0 {
		errs = append(errs[:mostErrors:mostErrors], fmt.Errorf("and %d more bad lines", more))
	}
	return errors.Join(errs...)
}

// A jobField is a member that a job's JSON object may have.
type jobField struct {
	name   string
	hint   string
	target func(*Job) any // the variable that takes its value
}

func jobFields() []jobField {
	return []jobField{
		{"id", "must be a string", func(j *Job) any { return &j.ID }},
		{"tenant", "must be a string", func(j *Job) any { return &j.Tenant }},
		{"method", `must be a string such as "POST"`, func(j *Job) any { return &j.Method }},
		{"url", "must be a string", func(j *Job) any { return &j.URL }},
		{"headers", `must be an object of strings, such as {"Accept": "text/html"}`,
			func(j *Job) any { return &j.Headers }},
		{"body", "must be a string, or an object or a list that is sent as JSON",
			func(j *Job) any { return &bodyField{j} }},
		{"cost", `must be a whole number, or an object of whole numbers such as {"tokens": 1500}`,
			func(j *Job) any { return &j.Cost }},
		{"max_retry", "must be a whole number", func(j *Job) any { return &j.MaxRetry }},
		{"type", "must be a string", func(j *Job) any { return &j.Type }},
	}
}

// A bodyField sets a body: to a string's text, or to the JSON of an object or a list.
type bodyField struct{ job *Job }

func (b *bodyField) UnmarshalJSON(data []byte) error {
	if data[0] != '{' && data[0] != '[' {
		return json.Unmarshal(data, &b.job.Body)
	}
	var compact bytes.Buffer
	err := json.Compact(&compact, data)
	b.job.Body, b.job.BodyJSON = compact.String(), true
	return err
}

func parseJob(line []byte, env environ.Lookup) (Job, error) {
	job := Job{MaxRetry: DefaultMaxRetry, Method: defaultMethod, Type: defaultType}
	fields := jobFields()
	seen, hasID := map[string]bool{}, false
	err := eachMember(line, func(name string, value json.RawMessage) error {
		i := slices.IndexFunc(fields, func(f jobField) bool { return f.name == name })
		if i < 0 {
			return fmt.Errorf("unknown field %q: %s", name, suggestField(name))
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
	return job, job.validate(hasID, env)
}

// eachMember calls f for the members of a JSON object, in their order. Unmarshalling into a struct would accept "URL"
// as "url", and of two members of one name keep the last.
func eachMember(line []byte, f func(name string, value json.RawMessage) error) error {
	var whole json.RawMessage
	if err := json.Unmarshal(line, &whole); err != nil {
		return fmt.Errorf("is not JSON: %w: must be one object on one line", err)
	}
	if line[0] != '{' {
		return fmt.Errorf(`%s: must be an object such as {"tenant": "acme", "url": "https://example.com/"}`,
			Shorten(string(line)))
	}
	d := json.NewDecoder(bytes.NewReader(line))
	d.Token() // skips the brace; no error is possible here and below, as the line is a valid object
	for d.More() {
		name, _ := d.Token()
		var value json.RawMessage
		_ = d.Decode(&value)
		if err := f(name.(string), value); err != nil {
			return err
		}
	}
	return nil
}

// Fields returns the names of the members that a job's object may have.
func Fields() []string {
	var names []string
	for _, f := range jobFields() {
		names = append(names, f.name)
	}
	return names
}

func suggestField(name string) string {
	names := Fields()
	if near := policyfile.Suggest(name, names); near != "" {
		return fmt.Sprintf("did you mean %q?", near)
	}
	return "must be one of " + strings.Join(names, ", ")
}

// Shorten shortens a text from a job for an error message.
func Shorten(s string) string {
	if len(s) > 80 {
		return s[:80] + "..."
	}
	return s
}
