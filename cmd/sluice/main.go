// Command sluice is the tool for operators of throttled workers: it shows which tasks wait, why and
// until when, and changes limits. It also runs HTTP calls of a file, throttled.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/redis/go-redis/v9/logging"
	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/cmd/sluice/internal/environ"
	"github.com/sluice-go/sluice/cmd/sluice/internal/show"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	logging.Disable()            // go-redis's own: its errors come back and are reported once
	os.Exit(NewMain().Run(ctx, os.Args[1:]))
}

// Exit codes.
const (
	exitDone        = 0   // every job succeeded
	exitFailed      = 1   // some did not, or the run broke off
	exitBadInput    = 2   // nothing was run
	exitInterrupted = 130 // by a signal
)

// errInterrupted ends a command whose context was cancelled.
var errInterrupted = errors.New("interrupted")

// An inputError is the user's to correct. Nothing was run.
type inputError struct{ error }

func (e inputError) Unwrap() error { return e.error }

// badInput makes any error one that is the user's to correct.
func badInput(format string, args ...any) error { return inputError{fmt.Errorf(format, args...)} }

// A usageError is an inputError about flags or arguments. The command's help says more.
type usageError struct{ error }

func badUsage(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// errJobsFailed is in the summary already.
var errJobsFailed = errors.New("some jobs failed")

// Main is the program. Tests run it with streams of their own.
type Main struct {
	Env    environ.Lookup // of variables of the environment
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer

	json bool // the flag that all commands have
}

// NewMain returns the program as it is run from a shell.
func NewMain() *Main {
	return &Main{Env: os.LookupEnv, Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr}
}

// show writes what a command found: as JSON, if that was asked for, or as print does.
func (m *Main) show(found any, print func()) error {
	if m.json {
		return show.JSON(m.Stdout, found)
	}
	print()
	return nil
}

// Run runs the program and returns its exit code.
func (m *Main) Run(ctx context.Context, args []string) int {
	err := m.command().Run(ctx, append([]string{"sluice"}, args...))
	switch {
	case err == nil:
		return exitDone
	case errors.Is(err, errInterrupted), errors.Is(err, context.Canceled):
		return exitInterrupted
	case errors.Is(err, errJobsFailed):
		return exitFailed
	}
	for line := range strings.Lines(err.Error()) {
		fmt.Fprintf(m.Stderr, "sluice: %s\n", strings.TrimSuffix(line, "\n"))
	}
	var unread cli.ExitCoder // such as for an unknown help topic
	if errors.As(err, &inputError{}) || errors.As(err, &unread) {
		return exitBadInput
	}
	return exitFailed
}
