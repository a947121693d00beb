package throttle

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// SetNow hands the scripts a time in microseconds instead of the clock of Redis.
func (l *Limiter) SetNow(now func() int64) { l.now = now }

// EditScripts changes the text of every script. An edit that finds nothing to change is an
// error: it was written for another text.
func (l *Limiter) EditScripts(edits ...func(string) string) error {
	found := make([]bool, len(edits))
	l.scripts.made, l.scripts.edit = nil, func(text string) string {
		for i, edit := range edits {
			edited := edit(text)
			found[i] = found[i] || edited != text
			text = edited
		}
		return text
	}
	for _, pl := range l.plans.Load().list {
		pl.scripts = l.scripts.of(pl.Windows)
	}
	if slices.Contains(found, false) {
		return errors.New("throttle: an edit finds nothing to change in any script")
	}
	return nil
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

// WithoutGrant lets every reserve take the long way.
func (l *Limiter) WithoutGrant() {
	for _, made := range l.scripts.made {
		made.grant = nil
	}
}
