package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/urfave/cli/v3"
	"go.yaml.in/yaml/v4"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/show"
	"github.com/sluice-go/sluice/throttle"
)

// checkCommand validates a policy file and prints what it means.
func (m *Main) checkCommand() *cli.Command {
	return &cli.Command{
		Name: "check", Usage: "validate a policy file and print what it means", ArgsUsage: "FILE",
		Action: func(_ context.Context, cmd *cli.Command) error {
			policies, err := m.loadPolicies(cmd.Args().First())
			if err != nil {
				return err
			}
			for i := range policies {
				policies[i] = policies[i].WithDefaults()
			}
			found := describe(policies)
			return m.show(found, func() { found.print(m.Stdout) })
		},
	}
}

// The policies of a file with every default written out. As YAML they are a policy file again.
type (
	checked struct {
		Policies []checkedPolicy `json:"policies" yaml:"policies"`
	}
	checkedPolicy struct {
		Name           string                   `json:"name" yaml:"name"`
		Match          []string                 `json:"match" yaml:"match,flow,omitempty"`
		Mode           throttle.Mode            `json:"mode" yaml:"mode"`
		Fail           throttle.FailMode        `json:"fail" yaml:"fail"`
		Failover       throttle.FailoverMode    `json:"failover" yaml:"failover"`
		Requeue        throttle.Requeue         `json:"requeue" yaml:"requeue"`
		Upstream       throttle.Upstream        `json:"upstream" yaml:"upstream"`
		Adapt          throttle.Adapt           `json:"adapt" yaml:"adapt"`
		MaxPause       string                   `json:"max_pause" yaml:"max_pause"`
		MaxRefusals    int64                    `json:"max_refusals,omitempty" yaml:"max_refusals,omitempty"`
		MaxRefusedWait string                   `json:"max_refused_wait,omitempty" yaml:"max_refused_wait,omitempty"`
		BatchShare     float64                  `json:"batch_share" yaml:"batch_share"`
		Shards         int                      `json:"shards" yaml:"shards"`
		Windows        []checkedWindow          `json:"windows" yaml:"windows"`
		Tenants        map[string]checkedTenant `json:"tenants" yaml:"tenants,omitempty"`
		Warnings       []string                 `json:"warnings" yaml:"-"`
	}
	checkedWindow struct {
		Name      string             `json:"name" yaml:"name"`
		Limit     int64              `json:"limit" yaml:"limit"`
		Period    string             `json:"period,omitempty" yaml:"period,omitempty"`
		Resets    string             `json:"resets,omitempty" yaml:"resets,omitempty"`
		Timezone  string             `json:"timezone,omitempty" yaml:"timezone,omitempty"`
		Unit      string             `json:"unit" yaml:"unit"`
		Per       []string           `json:"per" yaml:"per"`
		Algorithm throttle.Algorithm `json:"algorithm" yaml:"algorithm"`
		Anchor    throttle.Anchor    `json:"anchor,omitempty" yaml:"anchor,omitempty"`
		Burst     int64              `json:"burst,omitempty" yaml:"burst,omitempty"`
		Lease     string             `json:"lease,omitempty" yaml:"lease,omitempty"`
		Margin    string             `json:"margin,omitempty" yaml:"margin,omitempty"`
	}
	checkedTenant struct {
		Exempt  bool                       `json:"exempt" yaml:"exempt,omitempty"`
		Weight  float64                    `json:"weight" yaml:"weight"`
		Windows map[string]checkedOverride `json:"windows" yaml:"windows,omitempty"`
	}
	checkedOverride struct {
		Burst int64 `json:"burst,omitempty" yaml:"burst,omitempty"`
		Limit int64 `json:"limit,omitempty" yaml:"limit,omitempty"`
	}
)

func describe(policies []throttle.Policy) checked {
	found := checked{Policies: []checkedPolicy{}}
	for _, p := range policies {
		c := checkedPolicy{
			Name: p.Name, Match: append([]string{}, p.Match...), Mode: p.Mode, Fail: p.Fail, Failover: p.Failover,
			Requeue: p.Requeue, Upstream: p.Upstream, Adapt: p.Adapt, MaxPause: written(p.MaxPause),
			MaxRefusals: p.MaxRefusals, MaxRefusedWait: written(p.MaxRefusedWait), BatchShare: p.BatchShare,
			Shards: p.Shards, Tenants: map[string]checkedTenant{}, Warnings: append([]string{}, p.Warnings()...),
		}
		for _, w := range p.Windows {
			c.Windows = append(c.Windows, checkedWindow{
				Name: w.Name, Limit: w.Limit, Period: written(w.Period), Resets: w.Resets, Timezone: w.Timezone,
				Unit: w.Unit, Per: w.Scope.Attributes(), Algorithm: w.Algorithm, Anchor: w.Anchor, Burst: w.Burst,
				Lease: written(w.Lease), Margin: written(w.Margin),
			})
		}
		for name, t := range p.Tenants {
			own := checkedTenant{Exempt: t.Exempt, Weight: t.Weight, Windows: map[string]checkedOverride{}}
			for window, o := range t.Windows {
				own.Windows[window] = checkedOverride(o)
			}
			c.Tenants[name] = own
		}
		found.Policies = append(found.Policies, c)
	}
	return found
}

// written is a duration as a policy file has it, if there is one.
func written(d time.Duration) string {
	if d == 0 {
		return ""
	}
	return show.Short(d)
}

// inline puts each window and each tenant on a line. They are four levels below the file.
func inline(n *yaml.Node, depth int) {
	if depth >= 4 {
		n.Style |= yaml.FlowStyle
	}
	for _, inner := range n.Content {
		inline(inner, depth+1)
	}
}

// print writes a policy file. Warnings are comments.
func (c checked) print(w io.Writer) {
	var file yaml.Node
	err := file.Encode(c)
	if err == nil {
		inline(&file, 0)
		var text []byte
		text, err = yaml.Dump(&file, yaml.WithIndent(2), yaml.WithLineWidth(-1))
		w.Write(text)
	}
	if err != nil {
		panic(err) // it holds nothing that YAML does not know
	}
	for _, p := range c.Policies {
		for _, warning := range p.Warnings {
			fmt.Fprintf(w, "# warning: %s\n", warning)
		}
	}
}
