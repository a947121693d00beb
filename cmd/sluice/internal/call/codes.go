package call

import (
	"fmt"
	"strconv"
	"strings"
)

// Codes are HTTP status codes.
type Codes [600]bool

// What counts as success, and what is worth another try, unless it is said otherwise.
const (
	DefaultSuccess = "2xx,3xx"
	DefaultRetry   = "408,425,429,5xx"
)

// ParseCodes reads a list such as "2xx,404,500-503".
func ParseCodes(text string) (Codes, error) {
	var c Codes
	for part := range strings.SplitSeq(text, ",") {
		part = strings.TrimSpace(part)
		from, to, ranged := strings.Cut(part, "-")
		if class, all := strings.CutSuffix(part, "xx"); all {
			from, to, ranged = class+"00", class+"99", true
		}
		if !ranged {
			to = from
		}
		first, err1 := strconv.Atoi(from)
		last, err2 := strconv.Atoi(to)
		if err1 != nil || err2 != nil || first < 100 || last > 599 || first > last {
			return c, fmt.Errorf("%q: must be codes from 100 to 599, "+
				"such as 404, 2xx or 500-503, with commas between them", part)
		}
		for code := first; code <= last; code++ {
			c[code] = true
		}
	}
	return c, nil
}

// Has reports whether the code is one of them.
func (c Codes) Has(code int) bool { return code < len(c) && c[code] }

// An Outcome says what becomes of a job by the code of its answer. What is neither success nor worth
// a retry fails at once.
type Outcome struct{ success, retry Codes }

func defaultOutcome() (o Outcome) {
	o.success, _ = ParseCodes(DefaultSuccess)
	o.retry, _ = ParseCodes(DefaultRetry)
	return o
}

// NewOutcome makes an outcome of two lists; an empty one stands for its default. A code that is to be
// tried again is no success by default. A success is not tried again.
func NewOutcome(success, retry string) (Outcome, error) {
	o := defaultOutcome()
	var err error
	if success != "" {
		if o.success, err = ParseCodes(success); err != nil {
			return o, fmt.Errorf("--success %w", err)
		}
	}
	if retry != "" {
		if o.retry, err = ParseCodes(retry); err != nil {
			return o, fmt.Errorf("--retry %w", err)
		}
	}
	for code := range o.success {
		o.success[code] = o.success[code] && (success != "" || !o.retry[code])
		o.retry[code] = o.retry[code] && !o.success[code]
	}
	return o, nil
}
