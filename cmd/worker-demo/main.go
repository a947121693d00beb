// Command worker-demo runs throttled jobs through asynq: a built-in scenario without arguments,
// or HTTP calls of one's own with "run".
package main

import (
	"context"
	"embed"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path"
	"slices"
	"strings"
	"syscall"

	"github.com/redis/go-redis/v9/logging"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/drain"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/scenario"
	"github.com/sluice-go/sluice/internal/suggest"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	logging.Disable()            // go-redis's own: its errors come back and are told once
	os.Exit(NewMain().Run(ctx, os.Args[1:]))
}

// What the process exits with.
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

// errJobsFailed is told by the summary already.
var errJobsFailed = errors.New("some jobs failed")

// Main is the program. Tests run it with streams of their own.
type Main struct {
	Scenario scenario.Scenario
	Stdin    io.Reader
	Stdout   io.Writer
	Stderr   io.Writer
}

// NewMain returns the program as it is run from a shell.
func NewMain() *Main {
	return &Main{Scenario: scenario.Default(), Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr}
}

// A command is what stands behind a subcommand.
type command interface {
	ParseFlags(args []string) error
	Run(ctx context.Context) error
}

// Run runs the program and returns its exit code.
func (m *Main) Run(ctx context.Context, args []string) int {
	err := m.run(ctx, args)
	switch {
	case err == nil:
		return exitDone
	case errors.Is(err, errInterrupted), errors.Is(err, context.Canceled):
		return exitInterrupted
	case errors.Is(err, errJobsFailed):
		return exitFailed
	}
	for line := range strings.Lines(err.Error()) {
		fmt.Fprintf(m.Stderr, "worker-demo: %s\n", strings.TrimSuffix(line, "\n"))
	}
	if errors.As(err, &inputError{}) || errors.Is(err, drain.ErrForeignTask) {
		return exitBadInput
	}
	return exitFailed
}

func (m *Main) run(ctx context.Context, args []string) error {
	name := ""
	if len(args) > 0 && !strings.HasPrefix(args[0], "-") {
		name, args = args[0], args[1:]
	}
	var c command
	switch name {
	case "":
		c = &ScenarioCommand{Main: m}
	case "run":
		c = &RunCommand{Main: m}
	case "check":
		c = &CheckCommand{Main: m}
	case "help":
		return m.help(args)
	default:
		commands := []string{"run", "check", "help"}
		if near := suggest.Nearest(name, commands); near != "" {
			return badInput(`unknown command %q: did you mean %q?`, name, near)
		}
		return badInput(`unknown command %q: must be one of %s, or none for the scenario: see "worker-demo help"`, name, strings.Join(commands, ", "))
	}
	if err := c.ParseFlags(args); errors.Is(err, flag.ErrHelp) {
		return m.help([]string{name})
	} else if err != nil {
		return badInput("%w: see %q", err, strings.TrimSpace("worker-demo help "+name))
	}
	return c.Run(ctx)
}

//go:embed help/*.txt
var helpTexts embed.FS

// help prints the text of a command, or the first page.
func (m *Main) help(args []string) error {
	page := "worker-demo"
	if args = slices.DeleteFunc(args, func(a string) bool { return a == "" || a == "-h" }); len(args) > 0 {
		page = args[0]
	}
	text, err := helpTexts.ReadFile(path.Join("help", page+".txt"))
	if err != nil {
		return badInput(`help %s: there is no such command: must be run or check`, page)
	}
	_, err = m.Stdout.Write(text)
	return err
}

// parse reads a command's flags; what is left over is an error. Messages are printed by Run.
func parse(flags *flag.FlagSet, args []string) error {
	flags.SetOutput(io.Discard)
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q: every input has a flag", flags.Arg(0))
	}
	return nil
}
