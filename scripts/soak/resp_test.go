package main

import (
	"bufio"
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
	expect.Err(t, expect.ErrOf(readValue(r)), io.EOF, "at the end:")
	for _, bad := range []string{"?\r\n", "GET a\r\n", "$x\r\n", "\r\n"} {
		expect.Err(t, expect.ErrOf(readValue(bufio.NewReader(strings.NewReader(bad)))), errProtocol, bad)
	}
	got, err := words([]byte("*2\r\n$3\r\nGET\r\n$3\r\na\r\n\r\n"))
	expect.That(t, err == nil && slices.Equal(got, []string{"GET", "a\r\n"}), got, err)
	expect.Err(t, expect.ErrOf(words([]byte("+OK\r\n"))), errProtocol)
}
