// Package words shows names and durations to people, the same everywhere.
package words

import (
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Name is a name that is data: in quotes if it would break out of a line of text, or turn it around.
func Name(s string) string {
	hidden := func(r rune) bool { return !unicode.IsPrint(r) }
	if utf8.ValidString(s) && strings.TrimSpace(s) == s && !strings.ContainsFunc(s, hidden) {
		return s
	}
	return strconv.QuoteToGraphic(s)
}

// Span is a duration by its two largest units: "847ms", "2.3s", "1m30s", "3d4h".
func Span(d time.Duration) string {
	switch {
	case d < time.Second:
		return max(0, d).Round(time.Millisecond).String()
	case d < 10*time.Second:
		return d.Round(100 * time.Millisecond).String()
	}
	left, text, parts := d.Round(time.Second), "", 0
	for _, unit := range []struct {
		name string
		of   time.Duration
	}{{"y", 365 * 24 * time.Hour}, {"d", 24 * time.Hour}, {"h", time.Hour}, {"m", time.Minute}, {"s", time.Second}} {
		if n := left / unit.of; n > 0 && parts < 2 {
			text += fmt.Sprintf("%d%s", n, unit.name)
		}
		if left %= unit.of; text != "" {
			parts++
		}
	}
	return text
}
