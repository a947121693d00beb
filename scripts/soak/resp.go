package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
)

var errProtocol = errors.New("not the protocol of Redis")

// readValue reads one value of the Redis protocol (RESP 2 and 3) and returns it as it came.
func readValue(r *bufio.Reader) ([]byte, error) {
	var raw bytes.Buffer
	err := copyValue(&raw, r)
	return raw.Bytes(), err
}

func copyValue(raw *bytes.Buffer, r *bufio.Reader) error {
	line, err := r.ReadBytes('\n')
	if err != nil {
		return err
	}
	raw.Write(line)
	if len(line) < 3 {
		return fmt.Errorf("%w: %q", errProtocol, line)
	}
	kind, rest := line[0], string(bytes.TrimSpace(line[1:]))
	switch kind {
	case '+', '-', ':', ',', '#', '(', '_':
		return nil
	}
	n, err := strconv.ParseInt(rest, 10, 64)
	if err != nil {
		return fmt.Errorf("%w: %q", errProtocol, line)
	}
	switch kind {
	case '$', '=', '!':
		if n < 0 {
			return nil
		}
		_, err := io.CopyN(raw, r, n+2)
		return err
	case '%':
		n *= 2
	case '*', '~', '>':
	default:
		return fmt.Errorf("%w: %q", errProtocol, line)
	}
	for range n {
		if err := copyValue(raw, r); err != nil {
			return err
		}
	}
	return nil
}

// words are the bulk strings of a command.
func words(command []byte) ([]string, error) {
	values, err := parts(command)
	var words []string
	for _, value := range values {
		if word, ok := text(value); ok {
			words = append(words, word)
		}
	}
	if err != nil || len(words) == 0 {
		return nil, fmt.Errorf("%w: a command that begins with %.20q", errProtocol, command)
	}
	return words, nil
}

// parts are the values of an array, each as it came; a value that is no array is its only part.
func parts(value []byte) (all [][]byte, err error) {
	if len(value) == 0 || value[0] != '*' {
		return [][]byte{value}, nil
	}
	r := bufio.NewReader(bytes.NewReader(value))
	if _, err := r.ReadBytes('\n'); err != nil {
		return nil, err
	}
	for {
		part, err := readValue(r)
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		all = append(all, part)
	}
}

// text returns the text of a bulk string; false for anything else, nil included.
func text(value []byte) (string, bool) {
	size, rest, _ := bytes.Cut(value, []byte("\r\n"))
	number, isBulk := bytes.CutPrefix(size, []byte("$"))
	n, err := strconv.Atoi(string(number))
	if !isBulk || err != nil || n < 0 || n > len(rest) {
		return "", false
	}
	return string(rest[:n]), true
}
