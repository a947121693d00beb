package main

import (
	"context"
	"io"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
)

// firstLine keeps what is written, and tells when the first line is there.
type firstLine struct {
	mu   sync.Mutex
	text strings.Builder
	once sync.Once
	told chan struct{}
}

func (l *firstLine) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text.Write(p)
	if strings.Contains(l.text.String(), "\n") {
		l.once.Do(func() { close(l.told) })
	}
	return len(p), nil
}

func TestThePageIsServed(t *testing.T) {
	t.Parallel()
	d := newLiveWorkspace(t, livePolicies)
	for _, id := range []string{"1", "2"} {
		d.reserves(t, "acme", id)
	}
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	m, line := NewMain(), &firstLine{told: make(chan struct{})}
	m.Stdout, m.Stderr = io.Discard, line
	code := make(chan int)
	go func() {
		code <- m.Run(ctx, []string{
			"page", "--asynqmon", "http://localhost:8081",
			"--policies", d.path("policies.yml"), "--redis", "redis://" + d.addr, "127.0.0.1:0",
		})
	}()
	select {
	case <-line.told:
	case <-time.After(time.Minute):
		t.Fatal("it does not tell where the page is")
	}
	url := regexp.MustCompile(`http://\S+`).FindString(line.text.String())
	resp := valueOf(http.Get(url + "?policy=api"))(t)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	that(t, err == nil && strings.Contains(string(text), ">acme</bdi>"), err, text)
	interrupt()
	equal(t, <-code, exitDone, "exit code")
	d.run(t, "page", "nowhere").want(t, exitBadInput, `the page's address "nowhere": `)
}
