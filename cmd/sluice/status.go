package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/hibiken/asynq"
	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/cmd/sluice/internal/show"
	"github.com/sluice-go/sluice/internal/words"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/throttle/usage"
)

// StatusCommand shows the state of policies: who waits, since when and until when.
type StatusCommand struct {
	workersCommand

	Every   time.Duration
	Tenants int // that are shown
	Watch   bool
}

// namesShown is the number of processes with the same policies, and of tenants with most grants, that are named.
const namesShown = 5

// A policyStatus is a policy in the JSON of status.
type policyStatus struct {
	inspect.PolicyState
	PausedQueues []string    `json:"paused_queues,omitempty"` // by asynq's tools: no server takes from them
	Used         []usage.Use `json:"used,omitempty"`          // requests of the last hour, where package usage counts them
	More         bool        `json:"more,omitempty"`          // more may wait than Tenants has
}

// A fleetStatus is the JSON of status.
type fleetStatus struct {
	Source    string              `json:"source"`    // of the policies
	Processes map[string][]string `json:"processes"` // by which policies they run
	Policies  []policyStatus      `json:"policies"`
}

func (m *Main) statusCommand() *cli.Command {
	c := &StatusCommand{workersCommand: workersCommand{Main: m}}
	return &cli.Command{
		Name: "status", ArgsUsage: "[POLICY] [TENANT]", Usage: "show who waits, until when, and what is used", Action: onFleet(c.inForce, c.run),
		Flags: c.liveFlags(
			&cli.IntFlag{Name: "tenants", Value: 20, Destination: &c.Tenants, Validator: within(1, 500),
				Usage: "show at most `N` rows of tenants, 1 to 500"},
			&cli.BoolFlag{Name: "watch", Destination: &c.Watch,
				Usage: "show it again and again, until interrupted"},
			&cli.DurationFlag{Name: "every", Value: 2 * time.Second, Destination: &c.Every,
				Validator: within(100*time.Millisecond, time.Hour), Usage: "with --watch, once in `DURATION`"},
		),
	}
}

func (c *StatusCommand) run(ctx context.Context, f *fleet, cmd *cli.Command) error {
	for first := true; ; first = false {
		var err error
		if !first { // connect has read it the first time
			err = f.refresh(ctx, c.Policies)
		}
		if err == nil {
			err = c.showOnce(ctx, f, cmd.Args().Get(0), cmd.Args().Get(1))
		}
		switch {
		case ctx.Err() != nil && c.Watch:
			return nil
		case !c.Watch, first && err != nil:
			return err
		case err != nil: // Redis may come back
			fmt.Fprintln(c.Stderr, "sluice:", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(c.Every):
		}
	}
}

// showOnce shows one policy, or each if `policy` is "", with one tenant, or all that wait if `tenant` is "".
func (c *StatusCommand) showOnce(ctx context.Context, f *fleet, policy, tenant string) error {
	policies := inspect.Of(f.limiter).Policies()
	if policy != "" {
		if !slices.Contains(policies, policy) {
			return badInput("policy %q: must be one of %s", policy, strings.Join(policies, ", "))
		}
		policies = []string{policy}
	}
	processes, err := f.store.Processes(ctx)
	if err != nil {
		return err
	}
	found := fleetStatus{Source: f.source, Processes: processes, Policies: []policyStatus{}}
	for _, name := range policies {
		s, err := c.state(ctx, f, name, tenant)
		if err != nil {
			return err
		}
		if isOver := s.Removed && s.Waiting == 0; !isOver || policy != "" {
			found.Policies = append(found.Policies, s)
		}
	}
	if c.json && c.Watch { // one line each time
		return json.NewEncoder(c.Stdout).Encode(found)
	}
	return c.show(found, func() {
		if c.Watch && show.IsTerminal(c.Stdout) {
			fmt.Fprint(c.Stdout, "\x1b[H\x1b[2J") // from the top of an empty screen
		}
		fmt.Fprintln(c.Stdout, "policies: "+f.source)
		for _, runs := range slices.Sorted(maps.Keys(processes)) {
			fmt.Fprintln(c.Stdout, processesText(runs, processes[runs]))
		}
		for _, s := range found.Policies {
			fmt.Fprintln(c.Stdout)
			printPolicy(c.Stdout, s)
		}
	})
}

// state reads pages until it has enough tenants, as the page of a shard may be empty. If one page has all, it keeps
// the tenants with most tickets, else the tenants of the first pages.
func (c *StatusCommand) state(ctx context.Context, f *fleet, policy, tenant string) (s policyStatus, err error) {
	tenants := []inspect.State{} // in JSON no null
	q := inspect.Query{Policy: policy, Tenant: tenant}
	for complete := false; !complete; {
		if s.PolicyState, err = inspect.Of(f.limiter).State(ctx, q); err != nil {
			return s, err
		}
		tenants = append(tenants, s.Tenants...)
		q.After = s.Next
		complete = s.Next == "" || len(tenants) >= c.Tenants
	}
	s.More = s.Next != "" || len(tenants) > c.Tenants
	s.Tenants = tenants[:min(len(tenants), c.Tenants)]
	inspector := asynq.NewInspectorFromRedisClient(f.server.Client)
	for _, q := range s.Queues {
		if info, err := inspector.GetQueueInfo(queueOf(q.Queue)); err == nil && info.Paused { // an error: the queue is not asynq's
			s.PausedQueues = append(s.PausedQueues, q.Queue)
		}
	}
	s.Used, err = usage.Top(ctx, f.limiter, policy, namesShown)
	return s, err
}

// processesText names processes that run the same policies.
func processesText(runs string, names []string) string {
	parts := make([]string, min(len(names), namesShown))
	for i := range parts {
		parts[i] = words.Name(names[i])
	}
	if more := len(names) - len(parts); more > 0 {
		parts = append(parts, fmt.Sprintf("and %d more", more))
	}
	who := "1 process runs"
	if len(names) > 1 {
		who = fmt.Sprintf("%d processes run", len(names))
	}
	return fmt.Sprintf("%s %s: %s", who, runs, strings.Join(parts, ", "))
}

func printPolicy(w io.Writer, s policyStatus) {
	fmt.Fprintf(w, "policy %s at %s: %s waiting%s\n",
		s.Policy, clockText(s.At), countText(s.Waiting, "ticket"), rateText(s.PerSecond))
	for _, note := range notes(s.State) {
		fmt.Fprintln(w, note)
	}
	windows := show.NewTable(w, "SHARED WINDOW", "USED", "OF", "UNIT", "EMPTY IN")
	for _, u := range s.Windows {
		windows.Row(u.Name, u.Used, u.Burst, u.Unit, spanText(s.At, u.ResetsAt))
	}
	windows.Flush()
	if len(s.Used) > 0 {
		fmt.Fprintf(w, "%s\n", usedText(s.Used))
	}
	queues := show.NewTable(w, "QUEUE", "CLASS", "WAITING", "TENANTS", "LAST ASKED FOR", "")
	flows := int64(0)
	for _, q := range s.Queues {
		text := queueText(q, slices.Contains(s.PausedQueues, q.Queue))
		queues.Row(queueOf(q.Queue), q.Class, q.Waiting, q.Flows, spanText(q.Asked, s.At)+" ago", text)
		flows += q.Flows
	}
	queues.Flush()
	t := show.NewTable(w, "TENANT", "QUEUE", "CLASS", "WAITING", "OLDEST", "LAST STARTS IN", "WEIGHT", "SHARE", "WINDOWS", "")
	for _, tenant := range s.Tenants {
		queue := queueOf(tenant.Queue)
		if tenant.Waiting == 0 {
			queue = "-"
		}
		t.Row(tenantText(tenant), queue, tenant.Class, tenant.Waiting, spanText(tenant.Oldest, s.At), startText(tenant),
			tenant.Weight, fmt.Sprintf("%.3g%%", 100*tenant.Share), windowsText(tenant), otherText(tenant, s.PolicyState))
	}
	t.Flush()
	if s.More {
		fmt.Fprintf(w, "and more, of %d: \"sluice status %s TENANT\" shows one\n", flows, s.Policy)
	}
}

// usedText lists who was granted most.
func usedText(used []usage.Use) string {
	parts := make([]string, len(used))
	for i, use := range used {
		parts[i] = fmt.Sprintf("%s %.3g%%", words.Name(use.Tenant), 100*use.Part)
	}
	return "granted in the last hour to " + strings.Join(parts, ", ")
}

func tenantText(t inspect.State) string {
	text := t.Tenant
	for _, name := range slices.Sorted(maps.Keys(t.Attributes)) {
		text += ", " + name + "=" + t.Attributes[name]
	}
	return text
}

func queueText(q inspect.QueueState, paused bool) string {
	switch {
	case paused:
		return "paused by asynq's tools: no server takes from it"
	case !q.Served:
		return "no server takes from it"
	case q.Binds != "":
		return "waits for " + q.Binds
	}
	return ""
}

func rateText(perSecond float64) string {
	if perSecond == 0 {
		return ""
	}
	return fmt.Sprintf(", %.3g a second", perSecond)
}

// startText says in how long the last ticket is expected to start, and at the latest if that differs.
func startText(s inspect.State) string {
	text := spanText(s.At, s.Expected)
	if latest := spanText(s.At, s.Latest); s.Latest.After(s.Expected) && latest != text {
		return text + " to " + latest
	}
	return text
}

func windowsText(t inspect.State) string {
	parts := make([]string, len(t.Windows))
	for i, w := range t.Windows {
		parts[i] = fmt.Sprintf("%s %d/%d", w.Name, w.Used, w.Burst)
	}
	return strings.Join(parts, ", ")
}

// notes returns sentences about whatever changes the numbers of windows.
func notes(s inspect.State) (notes []string) {
	if s.Removed {
		notes = append(notes, "the policy was removed: what waits goes on by its last windows")
	}
	if s.Observes {
		notes = append(notes, "the policy only observes: nothing is denied")
	}
	if s.Pause != nil {
		notes = append(notes, s.Pause.Describe(s.At))
	}
	if r := s.Remaining; r != nil {
		notes = append(notes, fmt.Sprintf("%d %s left until %s by the upstream", r.Units, r.Unit, clockText(r.Until)))
	}
	if s.Adapted != nil {
		notes = append(notes, s.Adapted.String())
	}
	return notes
}

// otherText lists the notes of a tenant that its policy does not have.
func otherText(t inspect.State, s inspect.PolicyState) string {
	shared := notes(s.State)
	other := slices.DeleteFunc(notes(t), func(note string) bool { return slices.Contains(shared, note) })
	if t.Exempt {
		other = append(other, "exempt")
	}
	return strings.Join(other, "; ")
}

// spanText is a time span as words.Span has it, "-" if one of its ends is not known.
func spanText(from, to time.Time) string {
	if from.IsZero() || to.IsZero() {
		return "-"
	}
	return words.Span(to.Sub(from))
}
