package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/redisconn"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/show"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
)

// controlFlags are what all commands have that look at, or change, what is in force.
type controlFlags struct {
	*Main
	redisFlags

	By     string // who makes the change
	For    time.Duration
	Prefix string // of the limiter
	Why    string
}

func (c *controlFlags) flags(more ...cli.Flag) []cli.Flag {
	return append(append(more,
		&cli.StringFlag{Name: "prefix", Usage: "the workers' limiter has the Prefix `TEXT`", Destination: &c.Prefix},
	), c.redisFlags.flags("the Redis of the workers' limiter, `URL`; by default $SLUICE_REDIS_URL")...)
}

// changeFlags are flags, and those that a change needs.
func (c *controlFlags) changeFlags(more ...cli.Flag) []cli.Flag {
	return c.flags(append(more,
		&cli.StringFlag{Name: "why", Usage: "the reason, `TEXT`, is logged; it is required", Destination: &c.Why},
		&cli.StringFlag{Name: "by", Usage: "`NAME` makes the change; by default $USER", Destination: &c.By},
	)...)
}

func (c *controlFlags) forFlag(usage string) cli.Flag {
	return &cli.GenericFlag{Name: "for", Usage: usage, Value: durationValue{&c.For}}
}

// checkFor fails if --for is not how long a change may last.
func (c *controlFlags) checkFor() error {
	if c.For <= 0 || c.For > control.MaxTTL {
		return badInput("--for %v: must be how long, such as 10m, and at most %v", c.For, control.MaxTTL)
	}
	return nil
}

// by returns who makes the change, and why.
func (c *controlFlags) by() (control.By, error) {
	who, _ := c.Env("USER")
	by := control.By{Who: cmp.Or(c.By, who), Why: c.Why}
	switch {
	case strings.TrimSpace(by.Why) == "":
		return by, badInput("--why is missing: must be the reason of the change")
	case strings.TrimSpace(by.Who) == "":
		return by, badInput("--by is missing, and $USER is not set: must be who makes the change")
	}
	return by, nil
}

// A controlDesk is a store, and the Redis that it is in.
type controlDesk struct {
	*control.Store
	server *redisconn.Server
}

// connect opens the store.
func (c *controlFlags) connect(ctx context.Context) (controlDesk, error) {
	if err := c.redisFlags.validate(); err != nil {
		return controlDesk{}, inputError{err}
	}
	server, err := c.openWorkers(ctx, c.Env)
	if err != nil {
		return controlDesk{}, err
	}
	store, err := control.NewStore(server.Client, c.Prefix)
	if err != nil {
		server.Close()
		return controlDesk{}, inputError{err}
	}
	return controlDesk{store, server}, nil
}

// change connects, makes a change, and closes.
func (c *controlFlags) change(ctx context.Context, make func(controlDesk, control.By) error) error {
	by, err := c.by()
	if err != nil {
		return err
	}
	d, err := c.connect(ctx)
	if err != nil {
		return err
	}
	defer d.server.Close()
	return refused(make(d, by))
}

// refused makes of what was refused an error that is the user's to correct.
func refused(err error) error {
	var policy *throttle.PolicyError
	if errors.As(err, &policy) {
		return inputError{err}
	}
	return err
}

// checkPolicy fails if policies are published, and none has this name.
func (d controlDesk) checkPolicy(ctx context.Context, c *controlFlags, name string) error {
	state, err := d.State(ctx)
	if err != nil {
		return err
	}
	var names []string
	for _, p := range state.Policies {
		if p.Name == name {
			return nil
		}
		names = append(names, p.Name)
	}
	if len(names) == 0 {
		fmt.Fprintf(c.Stderr, "worker-demo: no policies are published: whether there is a policy %q is not known\n", name)
		return nil
	}
	return badInput("policy %q: must be one of %s", name, strings.Join(names, ", "))
}

// policyAndTenant reads the arguments of a command about a policy, or a tenant of it.
func policyAndTenant(cmd *cli.Command, needsTenant bool) (policy, tenant string, err error) {
	least, usage := 1, "a policy, or a policy and a tenant"
	if needsTenant {
		least, usage = 2, "a policy and a tenant"
	}
	if cmd.NArg() < least || cmd.NArg() > 2 || cmd.Args().First() == "" || cmd.NArg() == 2 && cmd.Args().Get(1) == "" {
		return "", "", badInput("%s needs %s: see %q", cmd.Name, usage, cmd.FullName()+" -h")
	}
	return cmd.Args().First(), cmd.Args().Get(1), nil
}

// about names a policy, or a tenant of it.
func about(policy, tenant string) string {
	if tenant == "" {
		return policy
	}
	return fmt.Sprintf("tenant %q of %s", tenant, policy)
}

// A done is what a command says of a change: as JSON, or as a line.
type done struct {
	Policy  string `json:"policy,omitempty"`
	Tenant  string `json:"tenant,omitempty"`
	Changed bool   `json:"changed"`
	Count   int    `json:"count,omitempty"`
	Version int64  `json:"version,omitempty"`
	Until   string `json:"until,omitempty"`
}

func (c *controlFlags) say(d done, format string, args ...any) error {
	if c.json {
		return show.JSON(c.Stdout, d)
	}
	fmt.Fprintf(c.Stdout, format+"\n", args...)
	return nil
}

// clockText is a time as people read it.
func clockText(t time.Time) string { return t.UTC().Format(time.DateTime) + " UTC" }

// policiesFlags are controlFlags of a command that needs the policies themselves.
type policiesFlags struct {
	controlFlags

	Policies string // file, "-" for stdin, or "" for those that are published
}

func (c *policiesFlags) policiesFlag() cli.Flag {
	return &cli.StringFlag{Name: "policies", Usage: "the policies are those of `FILE`, - for stdin; by default those that are published", Destination: &c.Policies, TakesFile: true}
}

// limiter returns a limiter that has the policies, one of which has this name.
func (c *policiesFlags) limiter(ctx context.Context, d controlDesk, name string) (*throttle.Limiter, error) {
	var policies []throttle.Policy
	var err error
	if c.Policies != "" {
		if policies, err = c.loadPolicies(c.Policies); err != nil {
			return nil, inputError{err}
		}
	} else {
		state, err := d.State(ctx)
		if err != nil {
			return nil, err
		}
		if state.PoliciesErr != nil {
			return nil, state.PoliciesErr
		}
		if policies = state.Policies; policies == nil {
			return nil, badInput("no policies are published: --policies must be the workers' policy file")
		}
	}
	var names []string
	for _, p := range policies {
		names = append(names, p.Name)
	}
	if !slices.Contains(names, name) {
		return nil, badInput("policy %q: must be one of %s", name, strings.Join(names, ", "))
	}
	limiter, err := throttle.New(throttle.Config{Client: d.server.Client, Policies: policies, Prefix: c.Prefix})
	if err != nil {
		return nil, inputError{err}
	}
	return limiter, nil
}
