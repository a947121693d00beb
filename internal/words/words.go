// Package words formats names and durations for people, in the same way everywhere.
package words

import (
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Name returns a user's name for a line of text: in quotes if it could break the line, or change its direction.
func Name(s string) string {
	unprintable := func(r rune) bool { return !unicode.IsPrint(r) }
	if utf8.ValidString(s) && strings.TrimSpace(s) == s && !strings.ContainsFunc(s, unprintable) {
		return s
	}
	return strconv.QuoteToGraphic(s)
}

// Span returns a duration in its two largest units: "847ms", "2.3s", "1m30s", "3d4h".
func Span(d time.Duration) string {
	switch {
	case d < time.Second:
		return max(0, d).Round(time.Millisecond).String()
	case d < 10*time.Second:
		return d.Round(100 * time.Millisecond).String()
	}
	left, text, units := d.Round(time.Second), "", 0 // units: since the first one in the text, also those that are 0
	for _, unit := range []struct {
		name   string
		length time.Duration
	}{{"y", 365 * 24 * time.Hour}, {"d", 24 * time.Hour}, {"h", time.Hour}, {"m", time.Minute}, {"s", time.Second}} {
		if n := left / unit.length; n > 0 && units < 2 {
			text += fmt.Sprintf("%d%s", n, unit.name)
		}
		if left %= unit.length; text != "" {
			units++
		}
	}
	return text
}
