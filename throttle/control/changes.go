package control

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// Kinds of changes.
const (
	Published  = "publish"
	Overridden = "override"
	Cleared    = "clear"
	Paused     = "pause"
	Resumed    = "resume"
	WasReset   = "reset"
	Dropped    = "drop"
)

// A Change is an entry of the log.
type Change struct {
	Author

	At      time.Time `json:"at,omitzero"`       // by the clock of Redis, in whole milliseconds
	ID      string    `json:"id,omitempty"`      // of the entry in the log
	Policy  string    `json:"policy,omitempty"`  // its name; "" if all were published
	Tenant  string    `json:"tenant,omitempty"`  // its name; "" for all
	Text    string    `json:"text,omitempty"`    // what has changed, for people
	Version int64     `json:"version,omitempty"` // its number: each change has the next one
	Kind    string    `json:"what"`              // such as Published

	Policies []throttle.Policy `json:"policies,omitempty"` // the published ones: for publishing them again
}

// Changes returns the last n changes, the newest first. The log keeps 10,000. The error may wrap that of Redis.
func (s *Store) Changes(ctx context.Context, n int) ([]Change, error) {
	entries, err := s.client().XRevRangeN(ctx, s.key("log"), "+", "-", int64(n)).Result()
	if err != nil {
		return nil, fmt.Errorf("control: reading the log: %w", err)
	}
	var changes []Change
	for _, e := range entries {
		var c Change
		if err := json.Unmarshal(fmt.Append(nil, e.Values["change"]), &c); err != nil {
			return nil, fmt.Errorf("control: entry %s of the log cannot be read: %w", e.ID, err)
		}
		var ms int64
		_, _ = fmt.Sscan(e.ID, &ms) // an ID is MILLISECONDS-NUMBER
		_, _ = fmt.Sscan(fmt.Sprint(e.Values["version"]), &c.Version)
		c.ID, c.At = e.ID, time.UnixMilli(ms).UTC()
		changes = append(changes, c)
	}
	return changes, nil
}

// Record logs a change that is made elsewhere, such as WasReset by throttle.Limiter.Reset. Call it
// before the change, so that no change is missing from the log. Errors are SetOverride's.
func (s *Store) Record(ctx context.Context, c Change) error {
	_, err := s.change(ctx, write{}, c)
	return err
}

// Differences describes how policies have changed, with the earlier and later limits of windows, such
// as "added mail, added mail/hour, github-api/provider 10/s -> 15/s". It is empty if nothing differs.
func Differences(earlier, later []throttle.Policy) string {
	oldFacts, newFacts := factsOf(earlier), factsOf(later)
	var parts []string
	for name, fact := range newFacts {
		switch old, known := oldFacts[name]; {
		case !known:
			parts = append(parts, "added "+name)
		case old.limit != fact.limit:
			parts = append(parts, name+" "+old.limit+" -> "+fact.limit)
		case old != fact:
			parts = append(parts, "changed "+name)
		}
		delete(oldFacts, name)
	}
	for name := range oldFacts {
		parts = append(parts, "removed "+name)
	}
	slices.Sort(parts)
	return strings.Join(parts, ", ")
}

// A policyFact is a policy, or one window with its limit, as texts that can be compared.
type policyFact struct{ text, limit string }

func factsOf(policies []throttle.Policy) map[string]policyFact {
	facts := map[string]policyFact{}
	for _, p := range policies {
		p = p.WithDefaults()
		for _, w := range p.Windows {
			text, _ := json.Marshal(w)
			facts[p.Name+"/"+w.Name] = policyFact{string(text), limitText(w)}
		}
		p.Windows = nil
		text, _ := json.Marshal(p)
		facts[p.Name] = policyFact{text: string(text)}
	}
	return facts
}

// limitText describes the limit of a window, such as "10/s" or "20/7s, burst 5".
func limitText(w throttle.Window) string {
	per := cmp.Or(w.Resets, "at once")
	if w.Period > 0 {
		short := map[time.Duration]string{time.Second: "s", time.Minute: "min", time.Hour: "h", 24 * time.Hour: "day"}
		per = cmp.Or(short[w.Period], w.Period.String())
	}
	text := fmt.Sprintf("%d/%s", w.Limit, per)
	if w.Burst > 0 && w.Burst != w.Limit {
		text += fmt.Sprintf(", burst %d", w.Burst)
	}
	return text
}
