package main

import (
	"bufio"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

func TestRepliesOfRedisAreRead(t *testing.T) {
	t.Parallel()
	values := []string{
		"+OK\r\n", "-NOT FOUND\r\n", ":1\r\n", "_\r\n", "#t\r\n", ",1.5\r\n", "$-1\r\n", "*-1\r\n", "$0\r\n\r\n",
		"$6\r\na\r\nb\r\n\r\n", "*2\r\n$1\r\na\r\n*1\r\n:1\r\n", "%1\r\n+a\r\n*1\r\n$-1\r\n", ">2\r\n+a\r\n+b\r\n", "~0\r\n",
	}
	r := bufio.NewReader(strings.NewReader(strings.Join(values, "")))
	for _, want := range values {
		if got, err := readValue(r); string(got) != want || err != nil {
			t.Errorf("%q, %v, want %q", got, err, want)
		}
	}
	if _, err := readValue(r); !errors.Is(err, io.EOF) {
		t.Errorf("at the end: %v", err)
	}
	for _, bad := range []string{"?\r\n", "GET a\r\n", "$x\r\n", "\r\n"} {
		if _, err := readValue(bufio.NewReader(strings.NewReader(bad))); !errors.Is(err, errProtocol) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	got, err := words([]byte("*2\r\n$3\r\nGET\r\n$3\r\na\r\n\r\n"))
	expect.That(t, err == nil && slices.Equal(got, []string{"GET", "a\r\n"}), got, err)
	if _, err := words([]byte("+OK\r\n")); !errors.Is(err, errProtocol) {
		t.Error(err)
	}
}
