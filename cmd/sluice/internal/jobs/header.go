package jobs

import (
	"errors"
	"fmt"
	"strings"

	"github.com/sluice-go/sluice/cmd/sluice/internal/environ"
)

// A Header is sent with a call. A job's header replaces one of --header that has the same name.
type Header struct{ Name, Value string }

// ParseHeader reads "Name: value".
func ParseHeader(text string, lookup environ.Lookup) (Header, error) {
	name, value, found := strings.Cut(text, ":")
	if !found {
		return Header{}, errors.New(`must be such as "Accept: text/html"`) // the text may be a secret
	}
	return newHeader(strings.TrimSpace(name), strings.TrimSpace(value), lookup)
}

// newHeader returns a header in whose value ${NAME} stands for a variable of the environment.
func newHeader(name, value string, lookup environ.Lookup) (Header, error) {
	if !isToken(name) {
		return Header{}, fmt.Errorf("name %q: must be one word such as Accept", Shorten(name))
	}
	if strings.ContainsFunc(value, control) {
		return Header{}, fmt.Errorf("%s %q: must not contain control characters", name, Shorten(value))
	}
	value, err := environ.Expand(value, lookup, func(v string) error {
		if strings.ContainsFunc(v, control) {
			return errors.New("its value must not contain control characters")
		}
		return nil
	})
	if err != nil {
		return Header{}, fmt.Errorf("%s: %w", name, err)
	}
	return Header{name, value}, nil
}

func control(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }

// isToken reports whether s is a token, as RFC 9110 (5.6.2) wants methods and names of headers to be.
func isToken(s string) bool {
	for i := range len(s) {
		c := s[i]
		if c <= ' ' || c >= 0x7f || strings.IndexByte(`"(),/:;<=>?@[\]{}`, c) >= 0 {
			return false
		}
	}
	return s != ""
}
