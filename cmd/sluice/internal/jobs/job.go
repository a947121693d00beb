// Package jobs reads files of jobs, and keeps the jobs' results.
package jobs

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/sluice-go/sluice/cmd/sluice/internal/environ"
	"github.com/sluice-go/sluice/throttle"
)

// A Job is one line of a jobs file: one HTTP call, made for one tenant.
type Job struct {
	Body     string
	BodyJSON bool // Content-Type is application/json, unless a header says otherwise
	Cost     Cost
	Headers  map[string]string
	ID       string
	MaxRetry int
	Method   string
	Tenant   string
	Type     string
	URL      string

	At string // "jobs.jsonl:12", for messages
}

// A Cost is the units that a job takes, by name. In JSON it is an object, or a number of requests.
type Cost map[string]int64

func (c *Cost) UnmarshalJSON(data []byte) error {
	var requests int64
	if err := json.Unmarshal(data, &requests); err == nil {
		*c = Cost{throttle.Requests: requests}
		return nil
	}
	return json.Unmarshal(data, (*map[string]int64)(c))
}

// Defaults of jobs.
const (
	DefaultMaxRetry = 3
	defaultMethod   = http.MethodGet
	defaultType     = "http:call"
)

// validate checks the job without its policy, and completes its headers.
func (j *Job) validate(hasID bool, env environ.Lookup) error {
	blank := func(text string) bool { return strings.TrimSpace(text) == "" }
	u, err := url.Parse(j.URL)
	isAbsolute := err == nil && u.Host != "" && (u.Scheme == "http" || u.Scheme == "https")
	switch {
	case hasID && (blank(j.ID) || len(j.ID) > throttle.MaxValueBytes):
		return fmt.Errorf("id %q: must be 1 to %d bytes, not only blanks", Shorten(j.ID), throttle.MaxValueBytes)
	case j.Tenant == "":
		return errors.New("tenant is missing: must name for whom the call is made")
	case j.URL == "":
		return errors.New("url is missing: must be what to call")
	case !isAbsolute:
		return fmt.Errorf("url %q: must be absolute, with http:// or https://", Shorten(j.URL))
	case j.MaxRetry < 0:
		return fmt.Errorf("max_retry %d: must be 0 or more", j.MaxRetry)
	case blank(j.Type):
		return fmt.Errorf("type %q: must not be blank", j.Type)
	case !isToken(j.Method):
		return fmt.Errorf("method %q: must be one word such as GET", Shorten(j.Method))
	}
	seen := map[string]bool{}
	for name, value := range j.Headers {
		h, err := newHeader(name, value, env)
		key := http.CanonicalHeaderKey(name)
		if err == nil && seen[key] {
			err = fmt.Errorf("%s: is there twice: must be there once", key)
		}
		if err != nil {
			return fmt.Errorf("headers: %w", err)
		}
		seen[key], j.Headers[name] = true, h.Value
	}
	return nil
}
