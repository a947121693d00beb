package main

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/show"
)

// A build is what "version" prints.
type build struct {
	Version  string `json:"version"`  // of the module; "(devel)" if it was built in its own tree
	Revision string `json:"revision"` // of the tree, "" if that is not known
	Modified bool   `json:"modified"` // the tree held changes beside the revision
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

func buildOf(info *debug.BuildInfo) build {
	b := build{Version: "unknown", Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	if info == nil {
		return b
	}
	b.Version = cmp.Or(info.Main.Version, b.Version)
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Revision = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		}
	}
	return b
}

func (b build) String() string {
	s := b.Version
	if b.Revision != "" {
		s += " revision " + b.Revision
	}
	if b.Modified {
		s += " with changes"
	}
	return fmt.Sprintf("%s, %s %s", s, b.Go, b.Platform)
}

func buildText() string {
	info, _ := debug.ReadBuildInfo()
	return buildOf(info).String()
}

func (m *Main) version(context.Context) error {
	info, _ := debug.ReadBuildInfo()
	b := buildOf(info)
	if m.json {
		return show.JSON(m.Stdout, b)
	}
	_, err := fmt.Fprintf(m.Stdout, "worker-demo %s\n", b)
	return err
}
