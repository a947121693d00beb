package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/cmd/sluice/internal/redisconn"
	"github.com/sluice-go/sluice/cmd/sluice/internal/show"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/usage"
)

// StatusCommand shows how policies stand: who waits, since when and until when.
type StatusCommand struct {
	workersCommand

	Every   time.Duration
	Policy  string // "" for all
	Tenant  string // "" for all that wait
	Tenants int    // that are shown
	Watch   bool
}

// usersShown is how many tenants are named that were granted most.
const usersShown = 5

// A policyStatus is a policy in the JSON of status.
type policyStatus struct {
	throttle.PolicyState
	Used []usage.Use `json:"used,omitempty"` // requests of the last hour, where package usage counts them
}

func (m *Main) statusCommand() *cli.Command {
	c := &StatusCommand{workersCommand: workersCommand{Main: m}}
	return &cli.Command{
		Name: "status", Usage: "show who waits, until when, and what is used", Action: c.Run,
		Flags: c.liveFlags(
			&cli.StringFlag{Name: "policy", Destination: &c.Policy,
				Usage: "only the policy `NAME`; by default all of the file"},
			&cli.StringFlag{Name: "tenant", Destination: &c.Tenant,
				Usage: "only the tenant `NAME`, even if it does not wait"},
			&cli.IntFlag{Name: "tenants", Value: 20, Destination: &c.Tenants,
				Usage: "show at most `N` tenants, 1 to 500"},
			&cli.BoolFlag{Name: "watch", Destination: &c.Watch,
				Usage: "show it again and again, until interrupted"},
			&cli.DurationFlag{Name: "every", Value: 2 * time.Second, Destination: &c.Every,
				Usage: "with --watch, once in `DURATION`"},
		),
	}
}

func (c *StatusCommand) Run(ctx context.Context, _ *cli.Command) error {
	switch {
	case c.Tenants < 1 || c.Tenants > throttle.MaxStatePage:
		return badUsage("--tenants %d: must be 1 to %d", c.Tenants, throttle.MaxStatePage)
	case c.Every < 100*time.Millisecond || c.Every > time.Hour:
		return badUsage("--every %v: must be 100ms to 1h", c.Every)
	}
	server, limiter, err := c.connect(ctx)
	if err != nil {
		return err
	}
	defer server.Close()
	policies := limiter.Policies()
	if c.Policy != "" {
		p, err := named(policies, c.Policy)
		if err != nil {
			return err
		}
		policies = []throttle.Policy{p}
	}
	for {
		states, err := c.states(ctx, server, limiter, policies)
		if ctx.Err() != nil && c.Watch {
			return nil
		}
		if err != nil {
			return err
		}
		if err := c.showStates(states); err != nil || !c.Watch {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(c.Every):
			c.intervene(ctx, server, limiter)
		}
	}
}

// states reads one page of each policy: of a few hundred tenants it is all of them, and shows those
// with most tickets first. It may be more than what is shown.
func (c *StatusCommand) states(
	ctx context.Context, server *redisconn.Server, limiter *throttle.Limiter, policies []throttle.Policy,
) ([]policyStatus, error) {
	states := make([]policyStatus, len(policies))
	for i, p := range policies {
		after := ""
		for { // a shard may have nobody that waits
			page, err := limiter.State(ctx, throttle.StateRequest{
				After: after, Limit: throttle.MaxStatePage, Policy: p.Name, Tenant: c.Tenant,
			})
			if err != nil {
				return nil, err
			}
			page.Tenants = append(states[i].Tenants, page.Tenants...)
			states[i].PolicyState = page
			if after = page.Next; after == "" || len(page.Tenants) >= c.Tenants {
				break
			}
		}
		states[i].Tenants = states[i].Tenants[:min(len(states[i].Tenants), c.Tenants)]
		var err error
		if states[i].Used, err = c.mostUsed(ctx, server, p.Name); err != nil {
			return nil, err
		}
	}
	return states, nil
}

func (c *StatusCommand) showStates(states []policyStatus) error {
	found := map[string]any{"policies": states}
	if c.json && c.Watch { // one line each time
		return json.NewEncoder(c.Stdout).Encode(found)
	}
	return c.show(found, func() {
		if c.Watch && show.IsTerminal(c.Stdout) {
			fmt.Fprint(c.Stdout, "\x1b[H\x1b[2J") // from the top of an empty screen
		}
		for i, s := range states {
			if i > 0 {
				fmt.Fprintln(c.Stdout)
			}
			printState(c.Stdout, s)
		}
	})
}

func printState(w io.Writer, s policyStatus) {
	fmt.Fprintf(w, "policy %s at %s: %s waiting%s\n",
		s.Policy, s.At.Local().Format(time.TimeOnly), count(s.Waiting, "ticket"), rateText(s.PerSecond))
	if s.Pause != nil {
		fmt.Fprintf(w, "  %s\n", s.Pause.Describe(s.At))
	}
	if s.Adapted != nil {
		fmt.Fprintf(w, "  %s\n", s.Adapted)
	}
	if len(s.Windows) > 0 {
		t := show.Table(w)
		fmt.Fprintln(t, "  SHARED WINDOW\tUSED\tOF\tUNIT\tEMPTY IN")
		for _, u := range s.Windows {
			fmt.Fprintf(t, "  %s\t%d\t%d\t%s\t%s\n", u.Name, u.Used, u.Burst, u.Unit, since(s.At, u.ResetsAt))
		}
		t.Flush()
	}
	if len(s.Used) > 0 {
		fmt.Fprintf(w, "  %s\n", usedText(s.Used))
	}
	if len(s.Queues) > 0 {
		t := show.Table(w)
		fmt.Fprintln(t, "  QUEUE\tCLASS\tWAITING\tTENANTS\tASKED\t")
		for _, q := range s.Queues {
			fmt.Fprintf(t, "  %s\t%s\t%d\t%d\t%s ago\t%s\n",
				printable(queueOf(q.Queue)), q.Class, q.Waiting, q.Flows, since(q.Asked, s.At), queueText(q))
		}
		t.Flush()
	}
	if len(s.Tenants) == 0 {
		return
	}
	t := show.Table(w)
	fmt.Fprintln(t, "  TENANT\tWAITING\tOLDEST\tLAST STARTS IN\tWEIGHT\tSHARE\tWINDOWS\t")
	tenants := int64(0)
	for _, q := range s.Queues {
		tenants += q.Flows
	}
	for _, tenant := range s.Tenants {
		fmt.Fprintf(t, "  %s\t%d\t%s\t%s\t%v\t%.3g%%\t%s\t%s\n",
			tenantText(tenant), tenant.Waiting, since(tenant.Oldest, s.At), lastText(tenant, s.At),
			tenant.Weight, 100*tenant.Share, windowsText(tenant), heldText(tenant, s.PolicyState))
	}
	t.Flush()
	if more := tenants - int64(len(s.Tenants)); more > 0 && s.Next != "" {
		fmt.Fprintf(w, "  and more, of %d: --tenant NAME shows one\n", tenants)
	}
}

// usedText lists who was granted most.
func usedText(used []usage.Use) string {
	parts := make([]string, len(used))
	for i, use := range used {
		parts[i] = fmt.Sprintf("%s %.3g%%", printable(use.Tenant), 100*use.Part)
	}
	return "granted in the last hour to " + strings.Join(parts, ", ")
}

func tenantText(t throttle.TenantState) string {
	scope := throttle.ScopeValue{}
	for _, w := range t.Windows {
		if len(w.Scope.Attributes) > len(scope.Attributes) {
			scope = w.Scope
		}
	}
	if len(t.Attributes) > 0 && len(scope.Attributes) > 1 {
		return scope.String()
	}
	return printable(t.Tenant)
}

// printable keeps names that are data from breaking out of a table.
func printable(s string) string {
	if quoted := fmt.Sprintf("%q", s); quoted[1:len(quoted)-1] != s {
		return quoted
	}
	return s
}

func queueText(q throttle.QueueState) string {
	switch {
	case !q.Served:
		return "no server takes from it"
	case q.SlotsBind:
		return "waits for handler slots" + rateText(q.PerSecond)
	}
	return ""
}

func rateText(perSecond float64) string {
	if perSecond == 0 {
		return ""
	}
	return fmt.Sprintf(", %.3g a second", perSecond)
}

func lastText(t throttle.TenantState, at time.Time) string {
	text := since(at, t.LastAt)
	if t.SlotsBind {
		return text + ", by slots"
	}
	if most := since(at, t.LastAtMost); t.LastAtMost.After(t.LastAt) && most != text {
		return text + " to " + most
	}
	return text
}

func windowsText(t throttle.TenantState) string {
	parts := make([]string, len(t.Windows))
	for i, w := range t.Windows {
		parts[i] = fmt.Sprintf("%s %d/%d", w.Name, w.Used, w.Burst)
	}
	return strings.Join(parts, ", ")
}

// heldText is what holds a tenant back that does not hold back all.
func heldText(t throttle.TenantState, s throttle.PolicyState) string {
	var parts []string
	if t.Exempt {
		parts = append(parts, "exempt")
	}
	if t.Pause != nil && (s.Pause == nil || *s.Pause != *t.Pause) {
		parts = append(parts, t.Pause.Describe(s.At))
	}
	if t.Adapted != nil && s.Adapted == nil {
		parts = append(parts, t.Adapted.String())
	}
	return strings.Join(parts, "; ")
}

// since is a time span in two digits or so, "-" if one of its ends is not known.
func since(from, to time.Time) string {
	if from.IsZero() || to.IsZero() {
		return "-"
	}
	return show.Rough(max(0, to.Sub(from)))
}
