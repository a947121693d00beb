package policyfile

import (
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/quote"
)

// An object is a mapping in the file. Its methods read one field each. They return the zero value
// for a missing field, which package throttle takes for the default. They report a field that
// cannot be used, and return the zero value for it too. A zero or an empty text cannot be used: it
// is not meant as the default.
type object struct {
	*decoder
	fields map[string]field
	keys   []string // of fields, in the order of the file
	line   int
	where  string
}

type field struct {
	line int // of the key
	node *yaml.Node
}

func (f field) item(i int) *yaml.Node { return follow(f.node).Content[i] }

// follow returns the node that an alias refers to, and other nodes as they are.
func follow(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

// object reads a mapping. Its keys are the known ones or, if none are given, any text. Errors name
// it by where and what, and show the example.
func (d *decoder) object(n *yaml.Node, line int, where, what, example string, known ...string) object {
	o := object{decoder: d, fields: map[string]field{}, line: line, where: where}
	n = follow(n)
	if n.Kind != yaml.MappingNode || n.ShortTag() != "!!map" {
		d.report(line, where, strings.TrimSpace(what+" "+show(n)), "must be a mapping such as "+example)
		return o
	}
	for i := 0; i < len(n.Content); i += 2 {
		line, shown := n.Content[i].Line, "key "+show(n.Content[i])
		if n.Content[i].ShortTag() == "!!merge" {
			d.report(line, where, shown, "must not be used: write the keys out, or use an alias for a whole value")
			continue
		}
		key, ok := d.asText(n.Content[i], line, where, "key")
		if !ok {
			continue
		}
		if first, ok := o.fields[key]; ok {
			d.report(line, where, shown, fmt.Sprintf("must appear once: it is on line %d already", first.line))
			continue
		}
		if len(known) > 0 && !slices.Contains(known, key) {
			d.report(line, where, shown, unknown(key, known))
			continue
		}
		o.fields[key] = field{line, n.Content[i+1]}
		o.keys = append(o.keys, key)
	}
	return o
}

// child reads a field as a mapping. The mapping of a missing field has no keys.
func (o object) child(key, where, what, example string, known ...string) object {
	f, ok := o.fields[key]
	if !ok {
		return object{decoder: o.decoder}
	}
	return o.object(f.node, f.line, where, what, example, known...)
}

func (o object) bad(key, hint string) {
	f := o.fields[key]
	o.report(f.line, o.where, key+" "+show(f.node), hint)
}

// check reports an error of package throttle about this object, at the line of the field it names.
func (o object) check(err error) {
	e, ok := errors.AsType[*throttle.PolicyError](err)
	if !ok {
		return
	}
	f, there := o.fields[e.Field]
	line, value := f.line, fmt.Sprint(e.Value)
	switch v := e.Value.(type) {
	case string:
		value = strconv.Quote(quote.Short(v))
	case []string:
		value = fmt.Sprintf("%q", v)
	}
	switch {
	case there && follow(f.node).Kind == yaml.ScalarNode:
		value = show(f.node)
	case !there && reflect.ValueOf(e.Value).IsZero():
		line, value = o.line, "is missing"
	case !there: // a default, or a name that is a key
		line = o.line
	}
	o.report(line, o.where, e.Field+" "+value, e.Hint)
}

func (o object) text(key string) string {
	f, ok := o.fields[key]
	if !ok {
		return ""
	}
	s, _ := o.asText(f.node, f.line, o.where, key)
	return s
}

// texts returns nil for a missing field, and one text for each element of a list.
func (o object) texts(key string) []string {
	f, ok := o.fields[key]
	if !ok {
		return nil
	}
	hint := "must be a list"
	if n := follow(f.node); n.Kind == yaml.ScalarNode && n.ShortTag() != "!!null" {
		hint += ": write [" + show(n) + "]"
	}
	texts := []string{}
	for _, n := range o.list(key, hint) {
		s, _ := o.asText(n, n.Line, o.where, key)
		texts = append(texts, s)
	}
	return texts
}

func (o object) scope(key string) throttle.Scope {
	if _, ok := o.fields[key]; !ok {
		return throttle.Scope{}
	}
	return throttle.Per(o.texts(key)...)
}

func (o object) list(key, hint string) []*yaml.Node {
	f, ok := o.fields[key]
	if !ok {
		return nil
	}
	n := follow(f.node)
	if n.Kind != yaml.SequenceNode || n.ShortTag() != "!!seq" {
		o.bad(key, hint)
		return nil
	}
	return n.Content
}

// digits is stricter than YAML: its parsers do not agree on the values of 0777 and 1_000.
var digits = regexp.MustCompile(`^(0|[1-9][0-9]*)(\.[0-9]+)?$`)

// scalar returns the text of a field if its type is one of the tags.
func (o object) scalar(key string, tags ...string) (text string, there, ok bool) {
	f, there := o.fields[key]
	if !there {
		return "", false, false
	}
	n := follow(f.node)
	return n.Value, true, n.Kind == yaml.ScalarNode && slices.Contains(tags, n.ShortTag())
}

func (o object) units(key string) int64 {
	n, _ := o.whole(key, 1, throttle.MaxLimit)
	return n
}

// whole reads a whole number. It returns false if the field is missing, or cannot be used.
func (o object) whole(key string, least, most int64) (int64, bool) {
	text, there, ok := o.scalar(key, "!!int")
	if !there {
		return 0, false
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if !ok || err != nil || n < least || n > most || !digits.MatchString(text) {
		o.bad(key, fmt.Sprintf("must be a whole number, %d to %d, in plain digits", least, most))
		return 0, false
	}
	return n, true
}

func (o object) number(key, hint string) float64 {
	text, there, ok := o.scalar(key, "!!int", "!!float")
	if !there {
		return 0
	}
	number, err := strconv.ParseFloat(text, 64)
	if !ok || err != nil || number == 0 || !digits.MatchString(text) {
		o.bad(key, hint)
		return 0
	}
	return number
}

func (o object) flag(key string) bool {
	text, there, ok := o.scalar(key, "!!bool")
	flag, err := strconv.ParseBool(text)
	if there && (!ok || err != nil) {
		o.bad(key, "must be true or false, without quotes")
	}
	return flag
}

func (o object) duration(key string) time.Duration {
	if text, there, number := o.scalar(key, "!!int", "!!float"); !there {
		return 0
	} else if number {
		o.bad(key, fmt.Sprintf("must have a unit: write %ss for seconds", text))
		return 0
	}
	text, _, ok := o.scalar(key, "!!str")
	duration, err := time.ParseDuration(text)
	if !ok || err != nil {
		o.bad(key, "must be a duration such as 500ms, 90s, 1m30s or 24h; h is the largest unit")
		return 0
	}
	return duration
}

// asText returns the text of a node. It reports a node that is not a text, or is empty.
func (d *decoder) asText(n *yaml.Node, line int, where, what string) (string, bool) {
	n = follow(n)
	switch {
	case n.Kind == yaml.ScalarNode && n.ShortTag() == "!!str" && n.Value != "":
		return n.Value, true
	case n.Kind == yaml.ScalarNode && n.Value != "" && n.ShortTag() != "!!null":
		d.report(line, where, what+" "+show(n), fmt.Sprintf("must be text: write %q", quote.Short(n.Value)))
	default:
		d.report(line, where, what+" "+show(n), "must be text, and not empty")
	}
	return "", false
}

// label names a policy or a window by its name, or by its number if it has no name.
func label(kind string, n *yaml.Node, i int) string {
	if n = follow(n); n.Kind == yaml.MappingNode {
		for j := 0; j < len(n.Content); j += 2 {
			if name := follow(n.Content[j+1]); n.Content[j].Value == "name" && name.Value != "" {
				return fmt.Sprintf("%s %q", kind, quote.Short(name.Value))
			}
		}
	}
	return fmt.Sprintf("%s %d", kind, i+1)
}

// show formats a value much as the file does, on one line.
func show(n *yaml.Node) string {
	n = follow(n)
	tag := ""
	if n.Style&yaml.TaggedStyle != 0 {
		tag = strconv.Quote(n.Tag) + " "
	}
	switch {
	case n.Kind == yaml.SequenceNode:
		return tag + "(a list)"
	case n.Kind == yaml.MappingNode:
		return tag + "(a mapping)"
	case n.ShortTag() == "!!null":
		return tag + "(nothing)"
	case n.ShortTag() == "!!str" || n.Style != 0:
		return tag + strconv.Quote(quote.Short(n.Value))
	}
	return quote.Short(n.Value)
}

// unknown returns the hint for an unknown key: the known key most like it, or all known keys.
func unknown(key string, known []string) string {
	if nearest := Suggest(key, known); nearest != "" {
		return fmt.Sprintf("is not known: did you mean %q?", nearest)
	}
	return "is not known: the keys here are " + strings.Join(known, ", ")
}
