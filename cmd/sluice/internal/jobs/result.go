package jobs

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// A Result is one line of a result log: how a job ended. It failed if Error is not empty.
type Result struct {
	ID        string    `json:"id"`
	Tenant    string    `json:"tenant"`
	Status    int       `json:"status"`              // the HTTP code of the last call's answer; 0 if it had none
	Attempts  int       `json:"attempts"`            // HTTP calls begun
	WaitedMS  int64     `json:"waited_ms"`           // from the start of the run until the first call began
	StartedAt time.Time `json:"started_at,omitzero"` // of the last call
	Error     string    `json:"error"`
	Answer
}

// An Answer is the part of the last call's answer that is kept: by default nothing.
type Answer struct {
	Body       string `json:"body,omitempty"`
	BodyBase64 []byte `json:"body_base64,omitempty"` // instead of a body that is not UTF-8
	BodyCut    bool   `json:"body_cut,omitempty"`    // the body was longer
}

// A Log has the results of jobs, one line each. It is safe for concurrent use.
type Log struct {
	Known map[string]Result // in the file when it was opened, by job

	file *os.File // nil if the lines go to a stream
	mu   sync.Mutex
	w    io.Writer
}

// NewLog returns a log that writes to a stream. It has no earlier results.
func NewLog(w io.Writer) *Log { return &Log{w: w} }

// OpenLog opens the log of a file, which it creates if there is none. It removes a last line that was written only
// in part, as by a crash.
func OpenLog(path string) (*Log, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	l := &Log{file: file, w: file}
	if err := l.load(path); err != nil {
		file.Close()
		return nil, err
	}
	return l, nil
}

func (l *Log) load(path string) error {
	data, err := io.ReadAll(l.file)
	if err != nil {
		return err
	}
	known, length, err := parseLog(path, data)
	if err != nil {
		return err
	}
	l.Known = known
	if length > len(data) { // an editor may have removed the newline at the end
		_, err = l.file.Write([]byte("\n"))
	} else if length < len(data) {
		err = l.file.Truncate(int64(length))
	}
	return err
}

// ReadLog returns the results in a file, none if there is no file. It changes nothing.
func ReadLog(path string) (map[string]Result, error) {
	data, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	known, _, err := parseLog(path, data)
	return known, err
}

// parseLog returns the last result of each job, and the length that the file should have: less if its last line was
// written only in part, and one more if only the newline at its end is missing.
func parseLog(path string, data []byte) (known map[string]Result, length int, err error) {
	known = map[string]Result{}
	for number := 1; length < len(data); number++ {
		line, _, ended := bytes.Cut(data[length:], []byte("\n"))
		r, err := ParseResult(line)
		const begin = `{"id":`
		beginsWell := bytes.HasPrefix(line, []byte(begin[:min(len(line), len(begin))]))
		if isPart := !ended && beginsWell && !json.Valid(line); err != nil && isPart {
			break
		}
		if err != nil {
			return nil, 0, fmt.Errorf("%s:%d: is not a result: %w: name another file, or correct the line",
				path, number, err)
		}
		length += len(line) + 1
		known[r.ID] = r
	}
	return known, length, nil
}

// ParseResult reads a line of a log. It is strict, so that no other file is taken for a log by mistake.
func ParseResult(line []byte) (Result, error) {
	d := json.NewDecoder(bytes.NewReader(line))
	d.DisallowUnknownFields()
	var r Result
	if err := d.Decode(&r); err != nil {
		return r, err
	}
	if r.ID == "" || d.More() {
		return r, errors.New("must be one object with an id")
	}
	return r, nil
}

// Add writes a result, by one call, so that a crash leaves at most one partial line. The last result of a job counts.
func (l *Log) Add(r Result) error {
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if n, err := l.w.Write(append(line, '\n')); err != nil {
		if info, _ := l.file.Stat(); n > 0 && info != nil { // else the next result would stand in the same line
			_ = l.file.Truncate(info.Size() - int64(n))
		}
		return fmt.Errorf("writing a result: %w", err)
	}
	return nil
}

// Close closes the file, if there is one.
func (l *Log) Close() error {
	if l.file == nil {
		return nil
	}
	return l.file.Close()
}
