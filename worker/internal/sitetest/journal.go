package sitetest

import (
	"fmt"
	"strings"
	"sync"
)

// A Journal keeps what is logged.
type Journal struct {
	mu   sync.Mutex
	text strings.Builder
}

// Write is that of an io.Writer.
func (j *Journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(p)
}

// String returns what was logged.
func (j *Journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.String()
}

// Count returns how often a text was logged.
func (j *Journal) Count(text string) int { return strings.Count(j.String(), text) }

// AsynqLog writes asynq's own log to a journal.
type AsynqLog struct{ *Journal }

func (l AsynqLog) Debug(args ...any) { fmt.Fprintln(l, args...) }
func (l AsynqLog) Info(args ...any)  { fmt.Fprintln(l, args...) }
func (l AsynqLog) Warn(args ...any)  { fmt.Fprintln(l, args...) }
func (l AsynqLog) Error(args ...any) { fmt.Fprintln(l, args...) }
func (l AsynqLog) Fatal(args ...any) { fmt.Fprintln(l, args...) }
