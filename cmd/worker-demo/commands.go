package main

import (
	"cmp"
	"context"
	"embed"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/throttle/policyfile"
)

//go:embed help/*.txt
var helpTexts embed.FS

// help returns the text of a command: a template, into which the library writes the flags.
func help(name string) string {
	text, err := helpTexts.ReadFile("help/" + name + ".txt")
	if err != nil {
		panic(fmt.Sprintf("worker-demo: %v", err)) // the texts are part of the program
	}
	return string(text)
}

// command is the whole command line.
func (m *Main) command() *cli.Command {
	scenario, run, check := &ScenarioCommand{Main: m}, &RunCommand{Main: m}, &CheckCommand{Main: m}
	batch, control := &BatchCommand{Main: m}, func() controlFlags { return controlFlags{Main: m} }
	live := liveCommand{Main: m}
	status, explain := &StatusCommand{liveCommand: live}, &ExplainCommand{liveCommand: live}
	simulate, doctor := &SimulateCommand{liveCommand: live}, &DoctorCommand{liveCommand: live}
	root := &cli.Command{
		Name:                          "worker-demo",
		Usage:                         "run throttled jobs through asynq",
		CustomRootCommandHelpTemplate: help("worker-demo"),
		Action:                        noArguments(scenario.Run),
		Commands: []*cli.Command{
			{
				Name:   "run",
				Usage:  "make HTTP calls of your own, throttled and once each",
				Flags:  run.flags(),
				Action: noArguments(run.Run),
			},
			{
				Name:      "batch",
				Usage:     "plan or fire a batch, and show, pause, resume or cancel it",
				ArgsUsage: "plan|run|status|pause|resume|cancel",
				Flags:     batch.flags(),
				Commands:  batch.verbs(),
				Action: func(ctx context.Context, cmd *cli.Command) error {
					return batch.Run(ctx, cmd.Args().Slice())
				},
			},
			{
				Name:      "check",
				Usage:     "validate a policy file and print what it means",
				ArgsUsage: "FILE",
				Action: func(ctx context.Context, cmd *cli.Command) error {
					if cmd.NArg() != 1 {
						return badInput(`check needs one policy file, or - for stdin: see "worker-demo check -h"`)
					}
					check.Policies = cmd.Args().First()
					return check.Run(ctx)
				},
			},
			(&LimitsCommand{controlFlags: control()}).command(),
			(&PauseCommand{control()}).command(),
			(&ResumeCommand{control()}).command(),
			(&ResetCommand{policiesFlags{controlFlags: control()}}).command(),
			(&DropCommand{policiesFlags: policiesFlags{controlFlags: control()}}).command(),
			(&FrontCommand{control()}).command(),
			{
				Name:   "status",
				Usage:  "show who waits, until when, and what is used",
				Flags:  status.flags(),
				Action: noArguments(status.Run),
			},
			{
				Name:   "explain",
				Usage:  "say why a task waits, and until when",
				Flags:  explain.flags(),
				Action: noArguments(explain.Run),
			},
			{
				Name:   "simulate",
				Usage:  "say when the backlog would be done by other limits or weights",
				Flags:  simulate.flags(),
				Action: noArguments(simulate.Run),
			},
			{
				Name:   "doctor",
				Usage:  "check whether a Redis is set up for workers",
				Flags:  doctor.flags(),
				Action: noArguments(doctor.Run),
			},
			{
				Name:   "version",
				Usage:  "print what this program was built from",
				Action: noArguments(m.version),
			},
		},
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "json", Usage: "write what a command shows as JSON to stdout", Destination: &m.json},
			&cli.StringFlag{Name: "http", Usage: "serve a page of the scenario at `ADDRESS`, such as localhost:8080", Destination: &scenario.HTTP, Local: true},
		},
		Version:               buildText(),
		EnableShellCompletion: true,
		ConfigureShellCompletionCommand: func(c *cli.Command) {
			c.Usage = "print the completion script of a shell: bash, zsh, fish or pwsh"
			c.Hidden = false
		},
		DisableSliceFlagSeparator: true, // the value of a header may hold commas
		ExitErrHandler:            func(context.Context, *cli.Command, error) {},
		OnUsageError:              usageError,
		Reader:                    m.Stdin,
		Writer:                    m.Stdout,
		ErrWriter:                 m.Stderr,
	}
	for _, c := range root.Commands {
		describeCommand(c, help(c.Name))
		if c.Name == "limits" {
			for _, verb := range c.Commands { // its help describes them
				describeCommand(verb, help(c.Name))
			}
		}
	}
	return root
}

// describeCommand gives a command its help, and what all commands have.
func describeCommand(c *cli.Command, help string) {
	for _, f := range c.Flags {
		f.(interface{ SetStringer(cli.FlagStringFunc) }).SetStringer(flagLine)
	}
	c.CustomHelpTemplate, c.HideHelpCommand = help, true
	c.DisableSliceFlagSeparator, c.OnUsageError = true, usageError
}

// flagLine is a flag in a help text. Its placeholder stands in its usage, between backquotes.
func flagLine(f cli.Flag) string {
	doc := f.(cli.DocGenerationFlag)
	name, usage := "--"+f.Names()[0], doc.GetUsage()
	if before, rest, found := strings.Cut(usage, "`"); found {
		placeholder, after, _ := strings.Cut(rest, "`")
		name, usage = name+" "+placeholder, before+placeholder+after
	}
	if d := strings.Trim(cmp.Or(doc.GetDefaultText(), doc.GetValue()), `"[]`); d != "" && d != "0" && doc.TakesValue() {
		usage += " (default: " + d + ")"
	}
	return name + "\t" + usage
}

// noArguments is the action of a command whose every input has a flag.
func noArguments(run func(context.Context) error) cli.ActionFunc {
	return func(ctx context.Context, cmd *cli.Command) error {
		if cmd.NArg() == 0 {
			return run(ctx)
		}
		arg := cmd.Args().First()
		if len(cmd.Commands) == 0 {
			return badInput(`unexpected argument %q: every input has a flag: see "%s -h"`, arg, cmd.FullName())
		}
		var names []string
		for _, c := range cmd.VisibleCommands() {
			names = append(names, c.Name)
		}
		if near := policyfile.Suggest(arg, names); near != "" {
			return badInput("unknown command %q: did you mean %q?", arg, near)
		}
		return badInput(`unknown command %q: must be one of %s, or none for the scenario: see "worker-demo -h"`, arg, strings.Join(names, ", "))
	}
}

// usageError says how to go on after a command line that the library cannot read.
func usageError(_ context.Context, cmd *cli.Command, err error, _ bool) error {
	see := fmt.Sprintf("see %q", cmd.FullName()+" -h")
	if name, unknown := strings.CutPrefix(err.Error(), "flag provided but not defined: -"); unknown {
		var names []string
		for _, f := range cmd.Flags {
			names = append(names, f.Names()...)
		}
		if near := policyfile.Suggest(name, names); near != "" {
			see = fmt.Sprintf("did you mean --%s?", near)
		}
		return badInput("unknown flag --%s: %s", name, see)
	}
	text := err.Error()
	if i := strings.Index(text, "strconv."); i >= 0 {
		text = text[:i] + "must be a whole number"
	}
	return badInput("%s: %s", text, see)
}

// A durationValue is a flag that is a duration. Its errors say what to write for one without a unit.
type durationValue struct{ d *time.Duration }

func (v durationValue) Get() any { return *v.d }

func (v durationValue) String() string {
	if v.d == nil {
		return ""
	}
	return v.d.String()
}

func (v durationValue) Set(s string) error {
	d, err := time.ParseDuration(s)
	if _, number := strconv.ParseFloat(s, 64); number == nil && s != "0" {
		return fmt.Errorf("must have a unit: write %ss for seconds", s)
	}
	if err != nil {
		return fmt.Errorf("must be a duration such as 500ms, 30s or 1m30s")
	}
	*v.d = d
	return nil
}
