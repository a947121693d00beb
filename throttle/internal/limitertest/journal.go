package limitertest

import (
	"strings"
	"sync"
)

// A Journal keeps what is logged.
type Journal struct {
	mu   sync.Mutex
	text strings.Builder
	read int // how much of it Lines has returned
}

// Write is that of an io.Writer.
func (j *Journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(p)
}

// Count returns how often a text was logged.
func (j *Journal) Count(text string) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return strings.Count(j.text.String(), text)
}

// Lines returns what was logged since the last call, without levels.
func (j *Journal) Lines() (lines []string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for line := range strings.Lines(j.text.String()[j.read:]) {
		_, message, _ := strings.Cut(strings.TrimSpace(line), "msg=")
		lines = append(lines, message)
	}
	j.read = j.text.Len()
	return lines
}
