// Package environ replaces references to environment variables in texts: ${NAME} stands for the value of NAME, and
// $${ for the text ${.
package environ

import (
	"fmt"
	"regexp"
	"strings"
)

// A Lookup returns the value of a variable, as os.LookupEnv does.
type Lookup func(name string) (value string, found bool)

var (
	reference  = regexp.MustCompile(`\$?\$\{[^}]*\}?`) // also a wrong one
	wellFormed = regexp.MustCompile(`^\$\{[A-Za-z_][A-Za-z0-9_]*\}$`)
)

// Expand replaces every ${NAME} by the value of NAME. If check is not nil, each value must pass it. The error names the
// first variable that is wrong, and never shows a value.
func Expand(text string, lookup Lookup, check func(value string) error) (string, error) {
	var first error
	expanded := reference.ReplaceAllStringFunc(text, func(found string) string {
		if strings.HasPrefix(found, "$$") {
			return found[1:]
		}
		name := strings.Trim(found, "${}")
		value, set := lookup(name)
		var err error
		switch {
		case !wellFormed.MatchString(found):
			err = fmt.Errorf("%s: must be the name of a variable such as ${TOKEN}; "+
				"$${ stands for the text ${", cut(found))
		case !set:
			err = fmt.Errorf("${%s}: the environment has no such variable: it must be set", name)
		case check != nil:
			if err = check(value); err != nil {
				err = fmt.Errorf("${%s}: %w", name, err)
			}
		}
		if err != nil && first == nil {
			first = err
		}
		return value
	})
	return expanded, first
}

// cut shortens a text for an error message.
func cut(s string) string {
	if len(s) > 40 {
		return s[:40] + "..."
	}
	return s
}
