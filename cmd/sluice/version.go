package main

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/urfave/cli/v3"
)

// thisBuild is what the program was built from: the version of the module, in a clone its revision, and
// "+dirty" if changed.
func thisBuild() string {
	version := "unknown"
	if info, ok := debug.ReadBuildInfo(); ok {
		version = cmp.Or(info.Main.Version, version)
	}
	return fmt.Sprintf("%s, %s %s/%s", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

func (m *Main) versionCommand() *cli.Command {
	return &cli.Command{
		Name: "version", Usage: "print what this program was built from",
		Action: func(context.Context, *cli.Command) error {
			return m.show(map[string]string{"version": thisBuild()}, func() { fmt.Fprintln(m.Stdout, "sluice", thisBuild()) })
		},
	}
}
