package main

import (
	"fmt"
	"io"
	"time"
)

// A progress shows the user how the soak is going.
type progress struct {
	w    io.Writer
	last time.Time
}

func (p *progress) line(format string, args ...any) { fmt.Fprintf(p.w, "soak: "+format+"\n", args...) }

// update shows a line, unless another one was shown in the last ten seconds.
func (p *progress) update(format string, args ...any) {
	if time.Since(p.last) > 10*time.Second {
		p.last = time.Now()
		p.line(format, args...)
	}
}
