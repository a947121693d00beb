package page

import (
	"cmp"
	"fmt"
	"html/template"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/sluice-go/sluice/internal/words"
	"github.com/sluice-go/sluice/throttle/control"
)

// Functions of the templates.
var functions = template.FuncMap{
	"changes":   control.DescribeOverride,
	"clock":     clock,
	"free":      free,
	"int64":     func(n int) int64 { return int64(n) },
	"isSlow":    isSlow,
	"in":        func(at, now time.Time) string { return words.Span(at.Sub(now)) },
	"long":      words.Span,
	"name":      name,
	"number":    number,
	"path":      url.PathEscape,
	"percent":   func(share float64) string { return fmt.Sprintf("%.0f %%", 100*share) },
	"queue":     queueName,
	"rounded":   rounded,
	"spans":     func() any { return spans },
	"trend":     trendOf,
	"window":    window,
	"rfc3339":   func(at time.Time) string { return at.UTC().Format(time.RFC3339) },
	"sentence":  sentence,
	"short":     short,
	"shorter":   func(s string) string { return cut(s, 16) },
	"since":     func(at, now time.Time) string { return words.Span(now.Sub(at)) },
	"unchanged": url.QueryEscape,
}

// name makes a name from data safe to show.
func name(s string) string { return cmp.Or(words.Name(s), `""`) }

// sentence returns a text with a capital letter.
func sentence(s string) string {
	first, size := utf8.DecodeRuneInString(s)
	return string(unicode.ToUpper(first)) + s[size:]
}

// short shows a name, cut if it is long.
func short(s string) string { return cut(name(s), 60) }

func cut(s string, n int) string {
	if shown := []rune(s); len(shown) > n {
		return string(shown[:n-1]) + "…"
	}
	return s
}

// number writes 12345 as 12,345.
func number(n int64) string {
	text := strconv.FormatInt(n, 10)
	for i := len(text) - 3; i > 0 && text[i-1] != '-'; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

// clock writes a time in UTC, as the page says, rounded up to a second, and with its date unless that is today's.
func clock(at, now time.Time) string {
	at, now = at.Add(time.Second-1).UTC(), now.UTC()
	if at.Format(time.DateOnly) == now.Format(time.DateOnly) {
		return at.Format("15:04:05")
	}
	return at.Format(map[bool]string{true: "Jan 2, 15:04", false: "Jan 2 2006, 15:04"}[at.Year() == now.Year()])
}

// queueName returns a queue's name without the ID of its asynq.
func queueName(queue string) string { return cmp.Or(queue[strings.Index(queue, "/")+1:], queue) }
