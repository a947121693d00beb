// Package policyfile reads policies from YAML. It is strict: an unknown key or a value that cannot be used is an error
// with file, line, policy, window, value and hint. docs/reference/policies.md describes the format.
package policyfile

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/glob"
)

const (
	maxBytes  = 1 << 20 // of one file
	maxErrors = 20      // reported for one file; the rest is counted
	maxNodes  = 1 << 18 // in one file, with every alias written out
)

// An Error describes a value in a policy file that cannot be used, and how to correct it.
type Error struct {
	File  string // the name given to Load or Parse
	Line  int    // from 1; 0 if the error has no line
	Where string // such as `policy "github-api", window "burst"`; empty outside of policies and batches
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

// A File is everything in a policy file.
type File struct {
	Policies []throttle.Policy
	Batches  []Batch
}

// Load reads a policy file. Errors are Parse's, or wrap the error of reading the file.
func Load(path string) ([]throttle.Policy, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("policyfile: %w", err)
	}
	return Parse(path, data)
}

// Parse parses the text of a policy file. It returns the policies in the order of the file. They are valid, and
// throttle.New accepts them together. Fields that the file leaves out are zero. The error joins an *Error for each
// mistake, sorted by line; those after the first 20 are only counted. Errors call the file by the name.
func Parse(name string, data []byte) ([]throttle.Policy, error) {
	f, err := ParseFile(name, data)
	return f.Policies, err
}

// ParseFile is Parse, but also returns the file's batches.
func ParseFile(name string, data []byte) (File, error) {
	d := &decoder{file: name}
	var f File
	if root := d.document(data); root != nil {
		file := d.mapping(nil, "", root.Line, root, reflect.TypeFor[File]())
		file.into(reflect.ValueOf(&f).Elem())
	}
	if len(d.errs) > 0 {
		return File{}, d.join()
	}
	return f, nil
}

// A decoder reads one file, and collects its mistakes.
type decoder struct {
	file string
	errs []*Error
}

func (d *decoder) report(line int, path, what, hint string) {
	d.errs = append(d.errs, &Error{d.file, line, path, what, hint})
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

// document returns the only document of the file. If it cannot, it reports why, and returns nil.
func (d *decoder) document(data []byte) *yaml.Node {
	if len(data) > maxBytes {
		d.report(0, "", "file is too large", fmt.Sprintf("must have at most %d bytes", maxBytes))
		return nil
	}
	if !d.checkCharacters(data) {
		return nil
	}
	var root, second yaml.Node
	loader, err := yaml.NewLoader(bytes.NewReader(data))
	if err == nil {
		err = loader.Load(&root)
	}
	isEmpty := errors.Is(err, io.EOF) || err == nil && follow(root.Content[0]).ShortTag() == "!!null"
	if err == nil && !isEmpty {
		err = loader.Load(&second)
	}
	switch {
	case isEmpty:
		d.report(0, "", "file is empty", `must have the key "policies"`)
	case err == nil:
		d.report(second.Line, "", `"---" begins a second document`, "must be one document: put all policies under one key")
	case !errors.Is(err, io.EOF):
		d.reportSyntax(err)
	case d.checkAliases(&root):
		return root.Content[0]
	}
	return nil
}

func (d *decoder) reportSyntax(err error) {
	line, hint := 0, err.Error()
	if e, ok := errors.AsType[*yaml.LoadError](err); ok {
		line, hint = e.Mark.Line, e.Message
	}
	if strings.Contains(hint, "alphabetic or numeric character") { // the name of an alias lacks one
		hint = `a text that begins with * or & must be quoted, such as "*"`
	}
	d.report(line, "", "not YAML", hint)
}

// checkFile checks the rules that hold between policies.
func (o *object) checkFile(policies []throttle.Policy) {
	lists := make([][]string, len(policies))
	for i, p := range policies {
		lists[i] = p.Match
	}
	objects := o.items["policies"]
	for _, overlap := range glob.Overlaps(lists) {
		first, second := objects[overlap.First], objects[overlap.Second]
		if name := policies[overlap.First].Name; name != "" && name == policies[overlap.Second].Name {
			continue // reported already
		}
		second.report(second.fields["match"].item(overlap.SecondGlob).Line,
			fmt.Sprintf("match %q", policies[overlap.Second].Match[overlap.SecondGlob]),
			fmt.Sprintf("must not match a task type that %s matches too, by %q on line %d", first.path,
				policies[overlap.First].Match[overlap.FirstGlob], first.fields["match"].item(overlap.FirstGlob).Line))
	}
	if len(policies) == 0 && o.mistakes == 0 {
		o.report(o.line, "no policy", `must have at least one under the key "policies"`)
	}
}

// checkPolicy validates as much as the errors so far allow: first the policy's own fields, then the
// whole policy, and then each of its tenants.
func (o *object) checkPolicy(p throttle.Policy) {
	all := p.Tenants
	p.Tenants = nil
	fieldsOnly := p
	if n := len(p.Windows); n > 0 && n <= throttle.MaxWindows {
		fieldsOnly.Windows = []throttle.Window{{Name: "w", Limit: 1, Period: time.Second}}
	}
	o.check(fieldsOnly.Validate())
	tenants := o.kids["tenants"]
	if o.mistakes == tenants.count() { // none is outside of the tenants
		o.check(p.Validate())
	}
	if o.mistakes > tenants.count() || tenants == nil {
		return
	}
	for name, t := range tenants.kids {
		if t.mistakes == 0 {
			p.Tenants = map[string]throttle.Tenant{name: all[name]}
			t.check(p.Validate())
		}
	}
}

// checkWindow validates a window alone, unless its algorithm cannot be read.
func (o *object) checkWindow(w throttle.Window) {
	if !o.unreadable["algorithm"] {
		o.check(throttle.Policy{Name: "p", Windows: []throttle.Window{w}}.Validate())
	}
}
