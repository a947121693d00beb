package main

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/throttle/policyfile"
)

//go:embed help/*.txt
var helpTexts embed.FS

// help returns the help of a command: a template, into which the library writes the flags.
func help(name string) string {
	text, err := helpTexts.ReadFile("help/" + name + ".txt")
	if err != nil {
		panic(fmt.Sprintf("sluice: %v", err)) // the texts are part of the program
	}
	return string(text)
}

// command returns the program's commands and flags.
func (m *Main) command() *cli.Command {
	root := &cli.Command{
		Name:                          "sluice",
		Usage:                         "see and change what throttled workers do",
		CustomRootCommandHelpTemplate: help("sluice"),
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if cmd.NArg() > 0 {
				return unknownCommand(cmd)
			}
			return cli.ShowRootCommandHelp(cmd)
		},
		Commands: []*cli.Command{
			m.statusCommand(),
			m.explainCommand(),
			m.simulateCommand(),
			m.pageCommand(),
			m.limitsCommand(),
			m.pauseCommand(),
			m.resumeCommand(),
			m.resetCommand(),
			m.frontCommand(),
			m.dropCommand(),
			m.doctorCommand(),
			m.checkCommand(),
			m.batchCommand(),
			m.runCommand(),
			m.versionCommand(),
		},
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "json", Destination: &m.json,
				Usage: "write what a command shows as JSON to stdout"},
		},
		Version:               thisBuild(),
		EnableShellCompletion: true,
		ConfigureShellCompletionCommand: func(c *cli.Command) {
			c.Usage = "print the completion script of a shell: bash, zsh, fish or pwsh"
			c.Hidden = false
		},
		DisableSliceFlagSeparator: true, // the value of a header may contain commas
		ExitErrHandler:            func(context.Context, *cli.Command, error) {},
		OnUsageError:              onUsageError,
		Reader:                    m.Stdin,
		Writer:                    m.Stdout,
		ErrWriter:                 m.Stderr,
	}
	for _, c := range root.Commands {
		finish(c, help(c.Name))
	}
	return root
}

// finish gives a command and its subcommands the help and the checks that all commands have.
func finish(c *cli.Command, help string) {
	for _, f := range c.Flags {
		f.(interface{ SetStringer(cli.FlagStringFunc) }).SetStringer(flagLine)
	}
	c.CustomHelpTemplate, c.HideHelpCommand = help, true
	c.DisableSliceFlagSeparator, c.OnUsageError = true, onUsageError
	for _, sub := range c.Commands {
		sub.Hidden = true // the text of the help describes it
		finish(sub, help)
	}
	run := c.Action
	c.Action = func(ctx context.Context, cmd *cli.Command) error {
		err := badArguments(cmd)
		if err == nil {
			err = run(ctx, cmd)
		}
		var wrong usageError
		if errors.As(err, &wrong) {
			return badInput("%w: see %q", wrong, cmd.FullName()+" -h")
		}
		return err
	}
}

// badArguments returns an error unless the arguments are as many as ArgsUsage names, such as "POLICY [TENANT]".
func badArguments(cmd *cli.Command) error {
	names := strings.Fields(cmd.ArgsUsage)
	required := len(names) - strings.Count(cmd.ArgsUsage, "[")
	switch n := cmd.NArg(); {
	case len(cmd.Commands) > 0:
		return unknownCommand(cmd)
	case n > 0 && len(names) == 0:
		return badUsage("unexpected argument %q: every input has a flag", cmd.Args().First())
	case n < required || n > len(names) || slices.Contains(cmd.Args().Slice(), ""):
		return badUsage("%s needs the arguments %s", cmd.Name, cmd.ArgsUsage)
	}
	return nil
}

// unknownCommand returns an error that names the commands that the first argument could be.
func unknownCommand(cmd *cli.Command) error {
	commands := cmd.VisibleCommands()
	if len(commands) == 0 { // finish has hidden the subcommands
		commands = cmd.Commands
	}
	var names []string
	for _, c := range commands {
		names = append(names, c.Name)
	}
	all := strings.Join(names, ", ")
	arg := cmd.Args().First()
	if arg == "" {
		return badUsage("%s needs one of %s", cmd.Name, all)
	}
	if near := policyfile.Suggest(arg, names); near != "" {
		return badInput("unknown command %q: did you mean %q?", arg, near)
	}
	return badInput("unknown command %q: must be one of %s: see %q", arg, all, cmd.FullName()+" -h")
}

// flagLine returns a flag's line in a help text. The placeholder of its value stands in the usage between backquotes.
func flagLine(f cli.Flag) string {
	doc := f.(cli.DocGenerationFlag)
	name, usage := "--"+f.Names()[0], doc.GetUsage()
	if lead, rest, found := strings.Cut(usage, "`"); found {
		placeholder, after, _ := strings.Cut(rest, "`")
		name, usage = name+" "+placeholder, lead+placeholder+after
	}
	value := strings.Trim(cmp.Or(doc.GetDefaultText(), doc.GetValue()), `"[]`)
	if doc.TakesValue() && value != "" && value != "0" && value != "0s" {
		usage += " (default: " + value + ")"
	}
	return name + "\t" + usage
}

// onUsageError returns the error for a command line that the library cannot parse, with a hint.
func onUsageError(_ context.Context, cmd *cli.Command, err error, _ bool) error {
	see := fmt.Sprintf("see %q", cmd.FullName()+" -h")
	text := err.Error()
	if name, unknown := strings.CutPrefix(text, "flag provided but not defined: -"); unknown {
		var names []string
		for _, f := range cmd.Flags {
			names = append(names, f.Names()...)
		}
		if near := policyfile.Suggest(name, names); near != "" {
			see = fmt.Sprintf("did you mean --%s?", near)
		}
		return badInput("unknown flag --%s: %s", name, see)
	}
	if flag, _, found := strings.Cut(text, "strconv.ParseInt"); found {
		text = flag + "must be a whole number"
	} else if flag, _, found := strings.Cut(text, "strconv."); found {
		text = flag + "must be a number"
	} else if flag, _, found := strings.Cut(text, "time: "); found {
		text = flag + "must be a duration such as 500ms, 30s or 1m30s"
	}
	return badInput("%s: %s", text, see)
}
