// Command sluice is the tool for operators of throttled workers: it shows which tasks wait, why and
// until when, and changes limits. It also makes the HTTP calls of a file, throttled.
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
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	logging.Disable()            // go-redis also returns the errors that it would log
	os.Exit(NewMain().Run(ctx, os.Args[1:]))
}

// Exit codes.
const (
	exitDone        = 0   // the command, and every job, succeeded
	exitFailed      = 1   // some job failed, or the command did
	exitBadInput    = 2   // nothing was run
	exitInterrupted = 130 // by a signal, which cancels the command's context
)

// An inputError is a mistake in what the user gave. Nothing was run.
type inputError struct{ error }

func (e inputError) Unwrap() error { return e.error }

func badInput(format string, args ...any) error { return inputError{fmt.Errorf(format, args...)} }

// A usageError is a mistake in flags or arguments: finish makes it an inputError that refers to the help.
type usageError struct{ error }

func badUsage(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// isBadInput reports whether nothing was run because of what the user gave.
func isBadInput(err error) bool {
	ofThisProgram := errors.As(err, &inputError{}) || errors.As(err, &usageError{})
	ofThrottle := errors.As(err, new(*throttle.PolicyError)) || errors.As(err, new(control.InputError))
	return ofThisProgram || ofThrottle || errors.As(err, new(cli.ExitCoder)) // the last: of package cli
}

// errShown sets the exit code alone: the command's output names the failure.
var errShown = errors.New("failed, as the output says")

// Main is the program. Tests replace its environment and streams.
type Main struct {
	Env    environ.Lookup
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer

	json bool // the flag --json
}

// NewMain returns the program with the environment and streams of this process.
func NewMain() *Main {
	return &Main{Env: os.LookupEnv, Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr}
}

// show writes the result of a command: as JSON if that was asked for, or else as print does.
func (m *Main) show(found any, print func()) error {
	if m.json {
		return show.JSON(m.Stdout, found)
	}
	print()
	return nil
}

// showAndFailIf is show for a command that fails if `failed` is set. The output names the failure: no message follows.
func (m *Main) showAndFailIf(failed bool, found any, print func()) error {
	err := m.show(found, print)
	if err == nil && failed {
		err = errShown
	}
	return err
}

// An interruptible reads stdin until the program is interrupted.
type interruptible struct {
	ctx   context.Context
	stdin io.Reader
}

func (in interruptible) Read(p []byte) (int, error) {
	type result struct {
		n   int
		err error
	}
	read := make(chan result, 1)
	go func() {
		n, err := in.stdin.Read(p)
		read <- result{n, err}
	}()
	select {
	case r := <-read:
		return r.n, r.err
	case <-in.ctx.Done():
		return 0, context.Canceled
	}
}

// Run runs the program and returns its exit code.
func (m *Main) Run(ctx context.Context, args []string) int {
	m.Stdin = interruptible{ctx, m.Stdin}
	err := m.command().Run(ctx, append([]string{"sluice"}, args...))
	switch {
	case err == nil:
		return exitDone
	case errors.Is(err, context.Canceled):
		return exitInterrupted
	case errors.Is(err, errShown):
		return exitFailed
	}
	for line := range strings.Lines(err.Error()) {
		fmt.Fprintf(m.Stderr, "sluice: %s\n", strings.TrimSuffix(line, "\n"))
	}
	if isBadInput(err) {
		return exitBadInput
	}
	return exitFailed
}
