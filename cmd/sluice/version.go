package main

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/urfave/cli/v3"
)

// thisBuild returns the version of the module, the Go release and the platform. In a clone the version has the
// revision, and "+dirty" if files were changed.
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
