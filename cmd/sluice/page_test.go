package main

import (
	"context"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"
)

func TestThePageIsServed(t *testing.T) {
	t.Parallel()
	d := newLiveWorkspace(t, livePolicies)
	for _, id := range []string{"1", "2"} {
		d.reserves(t, "acme", id)
	}
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	told, tell := context.WithCancel(t.Context())
	defer tell()
	m, line := NewMain(), &commandOutput{onWrite: func(text string) {
		if strings.Contains(text, "\n") {
			tell()
		}
	}}
	m.Stdout, m.Stderr = io.Discard, line
	code := make(chan int)
	go func() {
		code <- m.Run(ctx, []string{
			"page", "--asynqmon", "http://localhost:8081",
			"--policies", d.path("policies.yml"), "--redis", "redis://" + d.addr, "127.0.0.1:0",
		})
	}()
	select {
	case <-told.Done():
	case <-time.After(time.Minute):
		t.Fatal("it does not tell where the page is")
	}
	url := regexp.MustCompile(`http://\S+`).FindString(line.String())
	resp := valueOf(http.Get(url + "?policy=api"))(t)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	that(t, err == nil && strings.Contains(string(text), ">acme</bdi>"), err, text)
	interrupt()
	equal(t, <-code, exitDone, "exit code")
	d.run(t, "page", "nowhere").want(t, exitBadInput, `the page's address "nowhere": `)
}
