// Package script is the only way from Go to the scripts in Redis. It encodes calls, decodes
// replies, gathers requests into calls, and assembles the texts in lua/. It knows no policies:
// package throttle makes the requests.
//
// A call names one key, by which a cluster finds its server. Its arguments begin with a header
// (Runner.header) and go on with requests (Request) or the fields of a take (TakeRequest).
package script

import (
	"fmt"
	"strings"
	"time"
)

// A Policy is the part of a policy that the scripts know. It does not change after Prepare.
type Policy struct {
	Line       string   // its hash tag: the policy's name, unless it has shards
	Algorithms []string // Lua files of the algorithms in use, without ".lua", sorted
	BatchShare float64  // the share of batches in a scope's grants while live tickets wait there too
	Scopes     []string // attributes of every scope, separated by commas, narrow to broad
	Windows    []Window

	scripts *scripts
	keys    []string // of a call; on a Cluster there is one more, which keeps a slot together
	leases  bool     // some window holds its grants
	lists   bool     // some window has a list
	scopes  string   // arguments of every call
	windows string
}

// A Window is one window of a policy. A tenant's own parameters come with a request.
type Window struct {
	Scope  int // its place in Policy.Scopes, from 1
	Name   string
	Kind   string // the algorithm's letter
	Leases bool   // it holds its grants until they are released, or their leases run out
	Unit   string
	Params [4]int64

	// List, if not nil, replaces the last parameter by a list for calls around this time.
	List func(now time.Time) string
}

// Prepare makes a policy ready for calls, and returns it.
func (r *Runner) Prepare(p *Policy) *Policy {
	p.scripts = r.scriptsOf(p)
	prefix := Prefix(r.Prefix, p.Line)
	p.keys = []string{prefix + "q", prefix + "none"}
	var scopes, windows strings.Builder
	for _, attributes := range p.Scopes {
		fmt.Fprintf(&scopes, "%s;", attributes)
	}
	for _, w := range p.Windows {
		p.leases, p.lists = p.leases || w.Leases, p.lists || w.List != nil
		rest := "-"
		if w.List != nil {
			rest = fmt.Sprintf("%d,%s", w.Params[2], listed)
		} else if w.Params[2] != 0 || w.Params[3] != 0 {
			rest = fmt.Sprintf("%d,%d", w.Params[2], w.Params[3])
		}
		fmt.Fprintf(&windows, "%d %s%s %s %d %d %s;",
			w.Scope, w.Name, w.Kind, w.Unit, w.Params[0], w.Params[1], rest)
	}
	p.scopes, p.windows = scopes.String(), windows.String()
	return p
}

// listed stands for a parameter that is a list. The lists are in the next argument.
const listed = "@"

func (p *Policy) listsText(now int64) string {
	if !p.lists {
		return ""
	}
	around := time.Now()
	if now > 0 {
		around = time.UnixMicro(now)
	}
	var b strings.Builder
	for _, w := range p.Windows {
		if w.List != nil {
			b.WriteString(w.List(around))
			b.WriteByte(';')
		}
	}
	return b.String()
}

// header returns the first arguments of a call, with room for more. A call has the same number when it
// is repeated.
func (r *Runner) header(p *Policy, process string, seq int64, room int) []any {
	now := int64(0)
	if r.Now != nil {
		now = r.Now()
	}
	args := make([]any, 0, 6+room)
	return append(args, now, process, seq, p.scopes, p.windows, p.listsText(now))
}
