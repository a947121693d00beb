package policyfile

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// watchEvery is the time between two looks at the file. Notifications of the system would not do:
// some file systems send none, and none comes when a link to a directory is replaced.
const watchEvery = time.Second

// WatchConfig configures Watch.
type WatchConfig struct {
	// Load reads the policies. The default is Load of the path.
	Load func() ([]throttle.Policy, error)

	// Logger gets files that cannot be used, once each. The default is slog.Default().
	Logger *slog.Logger

	// Put puts policies in force, such as Limiter.SetPolicies, or refuses them by an error. It is
	// required.
	Put func([]throttle.Policy) error
}

// Watch puts the policies of a file in force whenever the file has changed, within a second, until
// ctx ends. It does so once at the beginning. A file that is missing, or cannot be used, is logged:
// the policies before stay in force. Without a WatchConfig.Put it logs that, and returns.
func Watch(ctx context.Context, path string, c WatchConfig) {
	c.Logger = cmp.Or(c.Logger, slog.Default())
	if c.Put == nil {
		c.Logger.Error("policyfile: the file is not watched: WatchConfig.Put is nil: must be such as Limiter.SetPolicies", "file", path)
		return
	}
	if c.Load == nil {
		c.Load = func() ([]throttle.Policy, error) { return Load(path) }
	}
	look := time.NewTicker(watchEvery)
	defer look.Stop()
	var seen os.FileInfo
	last := "" // error
	for {
		if now, err := os.Stat(path); err != nil || seen == nil || !same(seen, now) {
			if err == nil {
				seen = now
				err = c.put()
			}
			text := fmt.Sprint(err)
			if err != nil && text != last {
				c.Logger.Error("policyfile: the file cannot be used: the policies before stay in force", "file", path, "err", err)
			}
			last = text
		}
		select {
		case <-ctx.Done():
			return
		case <-look.C:
		}
	}
}

func (c WatchConfig) put() error {
	policies, err := c.Load()
	if err != nil {
		return err
	}
	return c.Put(policies)
}

func same(before, now os.FileInfo) bool {
	return os.SameFile(before, now) && before.Size() == now.Size() && before.ModTime().Equal(now.ModTime())
}
