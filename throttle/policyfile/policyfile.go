// Package policyfile reads policies from YAML. It is strict: an unknown key or a value that cannot
// be used is an error with file, line, policy, window, value and hint. docs/reference/policies.md
// describes the format.
package policyfile

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/glob"
	"github.com/sluice-go/sluice/throttle/internal/quote"
)

const (
	maxErrors = 20      // reported for one file; the rest is counted
	maxNodes  = 1 << 18 // in one file, with every alias written out
)

// An Error says what in a policy file cannot be used, and what would be right.
type Error struct {
	File  string // the name given to Load or Parse
	Line  int    // from 1; 0 if the error has no line
	Where string // such as `policy "github-api", window "burst"`; empty outside of policies
	What  string // the field and its value as in the file, such as `period "0s"`
	Hint  string // what it must be
}

func (e *Error) Error() string {
	s := "policyfile: " + e.File
	if e.Line > 0 {
		s += fmt.Sprintf(":%d", e.Line)
	}
	for _, part := range []string{e.Where, e.What, e.Hint} {
		if part != "" {
			s += ": " + part
		}
	}
	return s
}

// Load reads a policy file. Errors are Parse's, and wrapped errors of reading the file.
func Load(path string) ([]throttle.Policy, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("policyfile: %w", err)
	}
	return Parse(path, data)
}

// Parse parses the text of a policy file, which errors call by the name. It returns the policies in
// the order of the file. They are valid, and throttle.New accepts them together. Fields that the
// file leaves out are zero. The error joins an *Error for each mistake, by line. After the first 20
// it only counts them.
func Parse(name string, data []byte) ([]throttle.Policy, error) {
	f, err := ParseFile(name, data)
	return f.Policies, err
}

// A decoder turns one file into policies and collects its mistakes.
type decoder struct {
	file string
	errs []*Error
}

func (d *decoder) report(line int, where, what, hint string) {
	d.errs = append(d.errs, &Error{d.file, line, where, what, hint})
}

func (d *decoder) join() error {
	slices.SortStableFunc(d.errs, func(a, b *Error) int { return cmp.Compare(a.Line, b.Line) })
	var errs []error
	for _, e := range d.errs[:min(len(d.errs), maxErrors)] {
		errs = append(errs, e)
	}
	if more := len(d.errs) - maxErrors; more > 0 {
		errs = append(errs, fmt.Errorf("policyfile: %s: and %d more", d.file, more))
	}
	return errors.Join(errs...)
}

// document returns the only document of the file, or nil.
func (d *decoder) document(data []byte) *yaml.Node {
	if !d.readable(data) {
		return nil
	}
	var root, second yaml.Node
	loader, err := yaml.NewLoader(bytes.NewReader(data))
	if err == nil {
		err = loader.Load(&root)
	}
	if errors.Is(err, io.EOF) || err == nil && follow(root.Content[0]).ShortTag() == "!!null" {
		d.report(0, "", "file is empty", `must hold the key "policies"`)
		return nil
	}
	if err == nil {
		err = loader.Load(&second)
	}
	if err == nil {
		d.report(second.Line, "", `"---" begins a second document`, "must be one document: put all policies under one key")
		return nil
	}
	if !errors.Is(err, io.EOF) {
		line, hint := 0, err.Error()
		if e, ok := errors.AsType[*yaml.LoadError](err); ok {
			line, hint = e.Mark.Line, e.Message
		}
		d.report(line, "", "not YAML", hint)
		return nil
	}
	if !d.expands(&root) {
		return nil
	}
	return root.Content[0]
}

func (d *decoder) policies(file object) []throttle.Policy {
	var policies []throttle.Policy
	var objects []object
	nodes := file.list("policies", "must be a list of policies")
	for i, n := range nodes {
		p, o := d.policy(n, label("policy", n, i))
		if j := slices.IndexFunc(policies, func(other throttle.Policy) bool { return other.Name == p.Name && p.Name != "" }); j >= 0 {
			o.bad("name", fmt.Sprintf("is taken by the policy on line %d: policies have different names", objects[j].line))
		}
		policies, objects = append(policies, p), append(objects, o)
	}
	d.overlaps(policies, objects)
	if len(nodes) == 0 && len(d.errs) == 0 {
		d.report(file.line, "", "no policy", `must hold at least one under the key "policies"`)
	}
	return policies
}

func (d *decoder) overlaps(policies []throttle.Policy, objects []object) {
	lists := make([][]string, len(policies))
	for i, p := range policies {
		lists[i] = p.Match
	}
	overlaps, tooAlike := glob.Overlaps(lists)
	if tooAlike >= 0 {
		objects[tooAlike].bad("match", glob.TooAlike)
	}
	for _, o := range overlaps {
		first, second := objects[o.First], objects[o.Second]
		if name := policies[o.First].Name; name != "" && name == policies[o.Second].Name {
			continue // reported already
		}
		d.report(second.fields["match"].item(o.SecondGlob).Line, second.where,
			fmt.Sprintf("match %q", policies[o.Second].Match[o.SecondGlob]),
			fmt.Sprintf("must not match a task type that %s matches too, by %q on line %d",
				first.where, policies[o.First].Match[o.FirstGlob], first.fields["match"].item(o.FirstGlob).Line))
	}
}

func (d *decoder) policy(n *yaml.Node, where string) (throttle.Policy, object) {
	before := len(d.errs)
	o := d.object(n, n.Line, where, "", "{name: github-api, windows: [...]}",
		"name", "match", "mode", "fail", "upstream", "adapt", "batch_share",
		"max_pause", "max_refusals", "max_refused_wait", "requeue", "shards", "windows", "tenants")
	p := throttle.Policy{
		Adapt: throttle.Adapt(o.text("adapt")),
		BatchShare: o.number("batch_share",
			fmt.Sprintf("must be a number in plain digits, %v to %v", throttle.MinBatchShare, throttle.MaxBatchShare)),
		Fail:     throttle.FailMode(o.text("fail")),
		Match:    o.texts("match"),
		MaxPause: o.duration("max_pause"),

		MaxRefusals:    o.units("max_refusals"),
		MaxRefusedWait: o.duration("max_refused_wait"),

		Mode:     throttle.Mode(o.text("mode")),
		Name:     o.text("name"),
		Upstream: throttle.Upstream(o.text("upstream")),
		Requeue:  throttle.Requeue(o.text("requeue")),
		Shards:   int(o.units("shards")),
	}
	// Validate reports only its first error. So the parts are validated one by one.
	if len(d.errs) == before {
		alone := p
		alone.Windows = []throttle.Window{{Name: "w", Limit: 1, Period: time.Second}}
		o.check(alone.Validate())
	}
	p.Windows = d.windows(o)
	if len(d.errs) == before {
		o.check(p.Validate())
	}
	p.Tenants = d.tenants(o, p, len(d.errs) == before)
	return p, o
}

func (d *decoder) windows(policy object) []throttle.Window {
	var windows []throttle.Window
	lines := map[string]int{}
	for i, n := range policy.list("windows", "must be a list of windows such as [{name: burst, limit: 5, period: 3s}]") {
		before := len(d.errs)
		o := d.object(n, n.Line, policy.where+", "+label("window", n, i), "", "{name: burst, limit: 5, period: 3s}",
			"name", "limit", "period", "algorithm", "per", "unit", "margin", "burst", "anchor", "lease", "resets", "timezone")
		w := throttle.Window{
			Algorithm: throttle.Algorithm(o.text("algorithm")),
			Anchor:    throttle.Anchor(o.text("anchor")),
			Burst:     o.units("burst"),
			Lease:     o.duration("lease"),
			Limit:     o.units("limit"),
			Margin:    o.duration("margin"),
			Name:      o.text("name"),
			Period:    o.duration("period"),
			Resets:    o.text("resets"),
			Scope:     o.scope("per"),
			Timezone:  o.text("timezone"),
			Unit:      o.text("unit"),
		}
		if len(d.errs) == before {
			o.check(throttle.Policy{Name: "p", Windows: []throttle.Window{w}}.Validate())
		}
		if line, ok := lines[w.Name]; ok && w.Name != "" {
			o.bad("name", fmt.Sprintf("is taken by the window on line %d: windows of one policy have different names", line))
		} else {
			lines[w.Name] = o.line
		}
		windows = append(windows, w)
	}
	return windows
}

// tenants reads a policy's tenants. They can be validated only if the rest is valid.
func (d *decoder) tenants(policy object, p throttle.Policy, valid bool) map[string]throttle.Tenant {
	if _, ok := policy.fields["tenants"]; !ok {
		return nil
	}
	tenants := map[string]throttle.Tenant{}
	all := policy.child("tenants", policy.where, "tenants", "{acme: {weight: 2}}")
	for _, name := range all.keys {
		before := len(d.errs)
		where := fmt.Sprintf("%s, tenant %q", policy.where, quote.Short(name))
		o := all.child(name, where, "", "{weight: 2}", "weight", "exempt", "windows")
		t := throttle.Tenant{
			Exempt: o.flag("exempt"),
			Weight: o.number("weight", "must be a number in plain digits, above 0 and at most 1000000"),
		}
		overrides := o.child("windows", o.where, "windows", "{burst: {limit: 50}}")
		windows := map[string]object{}
		for _, window := range overrides.keys {
			w := overrides.child(window, fmt.Sprintf("%s, window %q", o.where, quote.Short(window)), "", "{limit: 50}", "limit", "burst")
			if t.Windows == nil {
				t.Windows = map[string]throttle.Override{}
			}
			t.Windows[window] = throttle.Override{Burst: w.units("burst"), Limit: w.units("limit")}
			windows[window] = w
		}
		tenants[name] = t
		if !valid || len(d.errs) > before {
			continue
		}
		p.Tenants = map[string]throttle.Tenant{name: t}
		err := p.Validate()
		e, _ := errors.AsType[*throttle.PolicyError](err)
		switch {
		case e == nil:
		case e.Window != "":
			windows[e.Window].check(err)
		case e.Field == "windows": // a window of that name cannot be overridden
			window := fmt.Sprint(e.Value)
			d.report(overrides.fields[window].line, o.where, fmt.Sprintf("windows %q", quote.Short(window)), e.Hint)
		default:
			o.check(err)
		}
	}
	return tenants
}
