package throttle

import (
	"errors"
	"regexp"
	"strings"

	"github.com/redis/go-redis/v9"
)

// SetNow hands the scripts a time in microseconds instead of the clock of Redis.
func (l *Limiter) SetNow(now func() int64) { l.now = now }

// EditScripts changes the text of every script. An edit that finds nothing to change is an
// error: it was written for another text.
func (l *Limiter) EditScripts(edits ...func(string) string) error {
	for _, script := range []struct {
		loaded **redis.Script
		body   string
		rest   string
	}{{&l.reserve, reserveLua, waitLua}, {&l.cancel, cancelLua, freedLua}} {
		text := scriptText(script.body, script.rest)
		for _, edit := range edits {
			edited := edit(text)
			if edited == text {
				return errors.New("throttle: an edit finds nothing to change in the script")
			}
			text = edited
		}
		*script.loaded = redis.NewScript(text)
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
