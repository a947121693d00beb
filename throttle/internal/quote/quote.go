// Package quote makes names that users chose fit for messages.
package quote

import "strconv"

// Short cuts a name to 64 bytes.
func Short(s string) string {
	if len(s) > 64 {
		return s[:64] + "..."
	}
	return s
}

// Name is Short, in quotes if the name would break out of a line of text.
func Name(s string) string {
	s = Short(s)
	if quoted := strconv.Quote(s); quoted[1:len(quoted)-1] != s {
		return quoted
	}
	return s
}
