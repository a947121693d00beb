package throttle

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// SetNow hands the scripts a time in microseconds instead of the clock of Redis.
func (l *Limiter) SetNow(now func() int64) { l.now = now }

// EditScripts changes the text of every script. An edit that finds nothing to change is an
// error: it was written for another text.
func (l *Limiter) EditScripts(edits ...func(string) string) error {
	var err error
	l.scripts.made, l.scripts.edit = nil, func(text string) string {
		for _, edit := range edits {
			edited := edit(text)
			if edited == text {
				err = errors.New("throttle: an edit finds nothing to change in the script")
			}
			text = edited
		}
		return text
	}
	for _, pl := range l.plans.Load().list {
		pl.scripts = l.scripts.of(pl.Windows)
	}
	return err
}

var expiry = regexp.MustCompile(`(redis\.call\('SET', .*), 'PX', .*\)\n`)

// WithoutExpiry lets every key live for ever.
func WithoutExpiry(script string) string { return expiry.ReplaceAllString(script, "$1)\n") }

// MergeFrom lets sliding windows merge their grants from so many entries on, not from 1024.
func MergeFrom(entries string) func(string) string {
	return func(script string) string {
		return strings.Replace(script, "local EXACT = 1024\n", "local EXACT = "+entries+"\n", 1)
	}
}

// ShiftClock lets the clock of Redis differ by so many microseconds.
func ShiftClock(us int64) func(string) string {
	return func(script string) string {
		return strings.Replace(script, "+ tonumber(t[2])\n", fmt.Sprintf("+ tonumber(t[2]) + %d\n", us), 1)
	}
}
