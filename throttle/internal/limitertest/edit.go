package limitertest

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// edited returns one edit of many, and a function that returns an error if one of them has found nothing to change.
func edited(edits []func(string) string) (edit func(string) string, check func() error) {
	var mu sync.Mutex
	found := make([]bool, len(edits))
	edit = func(text string) string {
		mu.Lock()
		defer mu.Unlock()
		for i, edit := range edits {
			changed := edit(text)
			found[i] = found[i] || changed != text
			text = changed
		}
		return text
	}
	return edit, func() error {
		if slices.Contains(found, false) {
			return errors.New("an edit finds nothing to change in any script")
		}
		return nil
	}
}

var expiry = regexp.MustCompile(`(redis\.call\('SET', .*), '[PE]X', .*\)( end)?\n`)

var edits sync.Map // by text: most limiters of a test have the same scripts

// WithoutExpiry lets every key live for ever.
func WithoutExpiry(text string) string {
	if known, ok := edits.Load(text); ok {
		return known.(string)
	}
	edit := strings.Replace(expiry.ReplaceAllString(text, "$1)$2\n"), "redis.call('EXPIRE', key, seconds)", "", 1)
	edits.Store(text, edit)
	return edit
}

var shortExpiry = regexp.MustCompile(`(redis\.call\('SET', .*), 'PX', .*\)( end)?\n`)

// WithoutShortExpiry lets every key live for ever, but for keys that are kept for a day.
func WithoutShortExpiry(text string) string { return shortExpiry.ReplaceAllString(text, "$1)$2\n") }

// ShiftClock lets the clock of Redis differ by so many microseconds.
func ShiftClock(us int64) func(string) string {
	return func(text string) string {
		return strings.Replace(text, "+ t[2]\n", fmt.Sprintf("+ t[2] + %d\n", us), 1)
	}
}
