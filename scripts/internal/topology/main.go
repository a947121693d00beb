// Command topology starts sentinels or a Redis Cluster: see scripts/topology.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/sluice-go/sluice/internal/servers"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "topology:", err)
		os.Exit(1)
	}
}

// run starts the topology and prints where it is. It ends with the context.
func run(ctx context.Context, args []string, out io.Writer) error {
	dir, err := os.MkdirTemp("", "topology")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	switch strings.Join(args, " ") {
	case "sentinel":
		s, err := servers.StartSentinels(dir, 2)
		if err != nil {
			return err
		}
		defer s.Stop()
		fmt.Fprintf(out, "redis-sentinel://%s?master=%s\n\n", strings.Join(s.Addrs(), ","), servers.MasterName)
		list(out, "primary", s.Redis[:1])
		list(out, "replica", s.Redis[1:])
		list(out, "sentinel", s.Sentinels)
	case "cluster":
		c, err := servers.StartCluster(dir, 3, 1)
		if err != nil {
			return err
		}
		defer c.Stop()
		fmt.Fprintf(out, "redis-cluster://%s\n\n", strings.Join(c.Addrs(), ","))
		list(out, "primary", c.Nodes[:3])
		list(out, "replica", c.Nodes[3:])
	default:
		return fmt.Errorf("%q: must be sentinel or cluster", args)
	}
	<-ctx.Done()
	return nil
}

func list(out io.Writer, role string, processes []*servers.Process) {
	for _, p := range processes {
		fmt.Fprintf(out, "%-8s %s  kill %d\n", role, p.Addr, p.Cmd.Process.Pid)
	}
}
