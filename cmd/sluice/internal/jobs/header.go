package jobs

import (
	"errors"
	"fmt"
	"strings"

	"github.com/sluice-go/sluice/cmd/sluice/internal/environ"
)

// A Header is sent with every call that has no header of that name itself.
type Header struct{ Name, Value string }

// ParseHeader reads "Name: value".
func ParseHeader(text string, lookup environ.Lookup) (Header, error) {
	name, value, found := strings.Cut(text, ":")
	h := Header{strings.TrimSpace(name), strings.TrimSpace(value)}
	if !found {
		return h, errors.New(`must be such as "Accept: text/html"`) // the text may be a secret
	}
	return h, checkHeader(h.Name, h.Value, lookup)
}

// HeaderValue is a header's value as it is sent: ${NAME} stands for a variable of the environment.
// Without a lookup it is the value itself.
func HeaderValue(value string, lookup environ.Lookup) (string, error) {
	if lookup == nil {
		return value, nil
	}
	return environ.Expand(value, lookup, func(v string) (string, error) {
		if strings.ContainsFunc(v, control) {
			return "", errors.New("its value must not contain control characters")
		}
		return v, nil
	})
}

func checkHeader(name, value string, lookup environ.Lookup) error {
	if !isToken(name) {
		return fmt.Errorf("name %q: must be one word such as Accept", Shorten(name))
	}
	if strings.ContainsFunc(value, control) {
		return fmt.Errorf("%s %q: must not contain control characters", name, Shorten(value))
	}
	if _, err := HeaderValue(value, lookup); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

func control(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }

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
