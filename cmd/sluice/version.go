package main

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/urfave/cli/v3"
)

// A build is what "version" prints.
type build struct {
	Version  string `json:"version"` // of the module; in a clone its revision, and "+dirty" if changed
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

func thisBuild() build {
	b := build{Version: "unknown", Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	if info, ok := debug.ReadBuildInfo(); ok {
		b.Version = cmp.Or(info.Main.Version, b.Version)
	}
	return b
}

func (b build) String() string { return b.Version + ", " + b.Go + " " + b.Platform }

func (m *Main) versionCommand() *cli.Command {
	return &cli.Command{
		Name: "version", Usage: "print what this program was built from",
		Action: func(context.Context, *cli.Command) error {
			b := thisBuild()
			return m.show(b, func() { fmt.Fprintf(m.Stdout, "sluice %s\n", b) })
		},
	}
}
