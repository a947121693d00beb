// Package environ puts environment variables into texts that people write: ${NAME} stands for the
// value of NAME, and $${ for the text ${.
package environ

import (
	"fmt"
	"regexp"
	"strings"
)

// A Lookup finds a variable, as os.LookupEnv does.
type Lookup func(name string) (value string, found bool)

var (
	reference = regexp.MustCompile(`\$?\$\{[^}]*\}?`)
	shape     = regexp.MustCompile(`^\$\{[A-Za-z_][A-Za-z0-9_]*\}$`)
)

// Expand replaces every ${NAME}, by a value that fit has made to fit the text, such as by escaping;
// nil takes values as they are. The error names a variable that is not set, and never a value.
func Expand(text string, lookup Lookup, fit func(value string) (string, error)) (string, error) {
	var first error
	expanded := reference.ReplaceAllStringFunc(text, func(found string) string {
		if strings.HasPrefix(found, "$$") {
			return found[1:]
		}
		name := strings.Trim(found, "${}")
		value, set := lookup(name)
		var err error
		switch {
		case !shape.MatchString(found):
			err = fmt.Errorf("%s: must be the name of a variable such as ${TOKEN}; "+
				"$${ stands for the text ${", cut(found))
		case !set:
			err = fmt.Errorf("${%s}: the environment has no such variable: it must be set", name)
		case fit != nil:
			if value, err = fit(value); err != nil {
				err = fmt.Errorf("${%s}: %w", name, err)
			}
		}
		if err != nil && first == nil {
			first = err
		}
		return value
	})
	if first != nil {
		return "", first
	}
	return expanded, nil
}

// cut keeps a message readable.
func cut(s string) string {
	if len(s) > 40 {
		return s[:40] + "..."
	}
	return s
}
