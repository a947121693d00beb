package main

import (
	"fmt"
	"io"
	"os"
	"time"
)

// A progress shows the user how the soak is going: on a terminal by one line that changes,
// elsewhere by a line every ten seconds.
type progress struct {
	w        io.Writer
	terminal bool
	last     time.Time
	dirty    bool
}

func newProgress(w io.Writer) *progress {
	p := &progress{w: w}
	if f, ok := w.(*os.File); ok {
		info, err := f.Stat()
		p.terminal = err == nil && info.Mode()&os.ModeCharDevice != 0
	}
	return p
}

func (p *progress) line(format string, args ...any) {
	if p.dirty {
		fmt.Fprintln(p.w)
	}
	p.dirty = false
	fmt.Fprintf(p.w, "soak: "+format+"\n", args...)
}

func (p *progress) now(format string, args ...any) {
	switch {
	case p.terminal:
		p.dirty = true
		fmt.Fprintf(p.w, "\r\033[Ksoak: "+format, args...)
	case time.Since(p.last) > 10*time.Second:
		p.last = time.Now()
		p.line(format, args...)
	}
}
