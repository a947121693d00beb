// Package script alone writes windows and lines, by scripts and, for a reset, by commands. It assembles
// their texts from lua/, encodes calls, decodes replies, and gathers requests into calls. It does not know
// throttle.Policy: package throttle makes the requests.
//
// The KEYS of a call are the key of the line's count and, on a Cluster, one that never exists. Its arguments are a
// header (Runner.call), and then requests (Request) or the fields of a take (TakeRequest).
package script

import (
	"encoding/json"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// A Policy is the part of a policy that the scripts know. It does not change after Prepare.
type Policy struct {
	Line       string   // its hash tag: the policy's name, unless it has shards
	Algorithms []string // Lua files of the algorithms in use, without ".lua", sorted
	BatchShare float64  // the share of batches in a scope's grants while live tickets wait there too
	Scopes     []Scope  // narrow to broad
	Windows    []Window
	Leases     bool         // some window holds its grants until they are released, or their leases run out
	Paused     func() int64 // returns when operators' pause of the policy ends (us); 0: there is none

	scripts map[string]*redis.Script // by name
	text    string                   // an argument of every call: see Prepare
}

// A Scope is the windows that are counted by the same attributes.
type Scope struct {
	Attributes string `json:"attributes"` // separated by commas
	OfTenant   bool   `json:"of_tenant"`  // one of them is the tenant
	Windows    []int  `json:"windows"`    // their indexes in Policy.Windows, from 1
}

// A Window is one window of a policy. A tenant's own parameters come with a request.
type Window struct {
	Scope  int // its index in Policy.Scopes, from 1
	Name   string
	Kind   string // the algorithm's letter
	Unit   string
	Params [4]int64

	// List, if not nil, returns a list that replaces the last parameter in calls around a time.
	List func(now time.Time) string
}

// Prepare makes a policy ready for calls, and returns it. The scripts get it as JSON: its scopes, its windows as [name,
// kind, unit, p1 .. p4], the scope of each window, whether some window holds its grants, and the share of batches.
func (r *Runner) Prepare(p *Policy) *Policy {
	p.scripts = map[string]*redis.Script{"decide": r.script(p, "decide"), "take": r.script(p, "take")}
	var windows []any
	var scopeOf []int
	for _, w := range p.Windows {
		windows = append(windows, []any{w.Name, w.Kind, w.Unit, w.Params[0], w.Params[1], w.Params[2], w.Params[3]})
		scopeOf = append(scopeOf, w.Scope)
	}
	p.text = toJSON([]any{p.Scopes, windows, scopeOf, p.Leases, p.BatchShare})
	return p
}

// toJSON encodes numbers and texts, which cannot fail. It returns "" for an object without fields.
func toJSON(value any) string {
	text, _ := json.Marshal(value)
	return strings.TrimPrefix(string(text), "{}")
}

// listsText returns the windows' lists for a call at the time now (us; 0: this machine's), as JSON by their names.
func (p *Policy) listsText(now int64) string {
	around, lists := time.Now().Round(0), map[string]string{} // by the wall clock, which may be set
	if now > 0 {
		around = time.UnixMicro(now)
	}
	for _, w := range p.Windows {
		if w.List != nil {
			lists[w.Name] = w.List(around)
		}
	}
	return toJSON(lists)
}
