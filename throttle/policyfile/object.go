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

// An object is a mapping in the file. It is read into a struct whose fields name the keys: see
// keyOf. A field whose key is left out stays zero, which means the default. So the file may not have
// an empty text, nor a zero where that is not the default. A field whose value cannot be used is reported, and is zero.
type object struct {
	*decoder
	broken     bool // some of its keys were reported: a key that seems missing may be one of them
	mistakes   int  // reported in it, and in the objects within it
	fields     map[string]field
	items      map[string][]*object // the mappings in its lists, by the list's key
	keys       []string             // of fields, in the order of the file
	kids       map[string]*object   // the mappings in its fields, by key
	line       int
	parent     *object
	unreadable map[string]bool // keys whose value was reported
	path       string          // Error.Where
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

// examples are shown in errors about values that must be mappings or lists of them.
var examples = map[reflect.Type]string{
	reflect.TypeFor[Batch]():             `{name: nightly, schedule: "0 2 * * *", tenants: [...], tasks: {...}}`,
	reflect.TypeFor[BatchTasks]():        `{type: "geocode:address", count: 1000}`,
	reflect.TypeFor[File]():              "{policies: [...]}",
	reflect.TypeFor[Hours]():             `{from: "22:00", to: "06:00"}`,
	reflect.TypeFor[int64]():             "1",
	reflect.TypeFor[throttle.Override](): "{limit: 50}",
	reflect.TypeFor[throttle.Policy]():   "{name: github-api, windows: [...]}",
	reflect.TypeFor[throttle.Tenant]():   "{weight: 2}",
	reflect.TypeFor[throttle.Window]():   "{name: burst, limit: 5, period: 3s}",
}

// singular names one item of a list or mapping, by its key.
var singular = map[string]string{
	"batches": "batch", "cost": "unit", "policies": "policy", "tenants": "tenant", "windows": "window",
}

var wordEnd = regexp.MustCompile(`([a-z])([A-Z])`)

// keyOf returns the key of a struct's field, such as "max_pause" of MaxPause.
func keyOf(f reflect.StructField) string {
	return strings.ToLower(wordEnd.ReplaceAllString(f.Name, "${1}_$2"))
}

// keysOf returns the keys of a struct, the name first. It returns none for a map, whose keys are any text.
func keysOf(t reflect.Type) (keys []string) {
	for i := 0; t.Kind() == reflect.Struct && i < t.NumField(); i++ {
		switch f := t.Field(i); {
		case f.Name == "Name":
			keys = slices.Insert(keys, 0, "name")
		case f.IsExported():
			keys = append(keys, keyOf(f))
		}
	}
	return keys
}

// mapping reads the keys of a mapping that must suit a type. Errors call the mapping by path.
func (d *decoder) mapping(parent *object, path string, line int, n *yaml.Node, t reflect.Type) *object {
	o := &object{
		decoder: d, fields: map[string]field{}, items: map[string][]*object{}, kids: map[string]*object{},
		line: line, parent: parent, unreadable: map[string]bool{}, path: path,
	}
	n = follow(n)
	if n.Kind != yaml.MappingNode || n.ShortTag() != "!!map" {
		example := examples[t]
		if t.Kind() == reflect.Map {
			example = "{NAME: " + examples[t.Elem()] + "}"
		}
		o.report(line, show(n), "must be a mapping such as "+example)
		o.broken = true
		return o
	}
	known := keysOf(t)
	for i := 0; i < len(n.Content); i += 2 {
		line, shown := n.Content[i].Line, "key "+show(n.Content[i])
		if n.Content[i].ShortTag() == "!!merge" {
			o.report(line, shown, "must not be used: write the keys out, or use an alias for a whole value")
			continue
		}
		key, ok := o.asText(n.Content[i], line, "key")
		if !ok {
			continue
		}
		if first, ok := o.fields[key]; ok {
			o.report(line, shown, fmt.Sprintf("must appear once: it is on line %d already", first.line))
			continue
		}
		if len(known) > 0 && !slices.Contains(known, key) {
			o.report(line, shown, unknown(key, known))
			continue
		}
		o.fields[key] = field{line, n.Content[i+1]}
		o.keys = append(o.keys, key)
	}
	o.broken = o.mistakes > 0
	return o
}

// within returns the path of a part of an object.
func (o *object) within(part string) string {
	if o.path == "" {
		return part
	}
	return o.path + ", " + part
}

func (o *object) report(line int, what, hint string) {
	o.decoder.report(line, o.path, what, hint)
	for ; o != nil; o = o.parent {
		o.mistakes++
	}
}

func (o *object) reportKey(key, hint string) {
	f := o.fields[key]
	o.unreadable[key] = true
	o.report(f.line, key+" "+show(f.node), hint)
}

// count returns how many mistakes are in an object, which may be nil.
func (o *object) count() int {
	if o == nil {
		return 0
	}
	return o.mistakes
}

// check reports the errors of package throttle about this object, at the lines of the fields that they
// name. It leaves out fields that were reported already.
func (o *object) check(err error) {
	joined, _ := err.(interface{ Unwrap() []error })
	if joined == nil {
		return
	}
	for _, err := range joined.Unwrap() {
		e, ok := errors.AsType[*throttle.PolicyError](err)
		holder := o
		if overrides := o.kids["windows"]; ok && e.Window != "" && overrides != nil { // o is a tenant
			holder = overrides.kids[e.Window]
		}
		if key, item, _ := strings.Cut(e.Field, "["); ok && !holder.unreadable[key] {
			holder.checkField(key, strings.TrimSuffix(item, "]"), e)
		}
	}
}

// checkField reports an error about a field, or an item of its list.
func (o *object) checkField(key, item string, e *throttle.PolicyError) {
	f, given := o.fields[key]
	line, value := f.line, fmt.Sprint(e.Value)
	switch v := e.Value.(type) {
	case string:
		value = strconv.Quote(quote.Short(v))
	case []string:
		value = fmt.Sprintf("%q", v)
	}
	i, noItem := strconv.Atoi(item)
	mapping := o.kids[key]
	switch {
	case given && noItem == nil:
		line = f.item(i).Line
	case given && mapping != nil: // the value is one of its keys
		line = mapping.fields[fmt.Sprint(e.Value)].line
	case given && follow(f.node).Kind == yaml.ScalarNode:
		value = show(f.node)
	case !given && reflect.ValueOf(e.Value).IsZero():
		line, value = o.line, "is missing"
		if o.broken {
			return
		}
	case !given: // a default, or a name that the file has as a key
		line = o.line
	}
	o.report(line, key+" "+value, e.Hint)
}

// into reads the object into a struct, and checks it.
func (o *object) into(v reflect.Value) {
	for i := range v.NumField() {
		f := v.Type().Field(i)
		if _, given := o.fields[keyOf(f)]; given && f.IsExported() {
			o.read(keyOf(f), v.Field(i))
		}
	}
	switch target := v.Addr().Interface().(type) {
	case *File:
		o.checkFile(target.Policies)
	case *throttle.Policy:
		o.checkPolicy(*target)
	case *throttle.Window:
		o.checkWindow(*target)
	case *Batch:
		target.object = o
		o.checkBatch(*target)
	}
}

// read reads the value of a key into a field.
func (o *object) read(key string, target reflect.Value) {
	f := o.fields[key]
	switch v := target.Addr().Interface().(type) {
	case *time.Duration:
		*v = o.duration(key)
		return
	case *[]string:
		*v = o.texts(key)
		return
	case **int:
		if n, ok := o.whole(key, 0, 1000); ok {
			*v = new(int(n))
		}
		return
	}
	switch target.Kind() {
	case reflect.String:
		s, _ := o.asText(f.node, f.line, key)
		target.SetString(s)
	case reflect.Int, reflect.Int64:
		n, _ := o.whole(key, 1, throttle.MaxLimit)
		target.SetInt(n)
	case reflect.Float64:
		target.SetFloat(o.number(key))
	case reflect.Bool:
		target.SetBool(o.flag(key))
	case reflect.Struct:
		o.kids[key] = o.mapping(o, o.within(key), f.line, f.node, target.Type())
		o.kids[key].into(target)
	case reflect.Map:
		o.readMap(key, target)
	case reflect.Slice:
		o.readList(key, target)
	}
}

func (o *object) readMap(key string, target reflect.Value) {
	all := o.mapping(o, o.within(key), o.fields[key].line, o.fields[key].node, target.Type())
	o.kids[key] = all
	target.Set(reflect.MakeMap(target.Type()))
	for _, name := range all.keys {
		value := reflect.New(target.Type().Elem()).Elem()
		if value.Kind() == reflect.Struct {
			f, part := all.fields[name], fmt.Sprintf("%s %q", singular[key], quote.Short(name))
			all.kids[name] = o.mapping(all, o.within(part), f.line, f.node, value.Type())
			all.kids[name].into(value)
		} else {
			all.read(name, value)
		}
		target.SetMapIndex(reflect.ValueOf(name), value)
	}
}

// readList reads a list of mappings, whose names must differ.
func (o *object) readList(key string, target reflect.Value) {
	lines := map[string]int{}
	for i, n := range o.list(key, "must be a list such as ["+examples[target.Type().Elem()]+"]") {
		value := reflect.New(target.Type().Elem()).Elem()
		item := o.mapping(o, o.within(itemName(singular[key], n, i)), n.Line, n, value.Type())
		item.into(value)
		name := value.FieldByName("Name").String()
		if line, taken := lines[name]; taken && name != "" {
			item.reportKey("name", fmt.Sprintf("is taken by the %s on line %d: %s have different names",
				singular[key], line, key))
		} else {
			lines[name] = item.line
		}
		o.items[key] = append(o.items[key], item)
		target.Set(reflect.Append(target, value))
	}
}

// texts reads one text for each element of a list.
func (o *object) texts(key string) []string {
	hint := "must be a list"
	if n := follow(o.fields[key].node); n.Kind == yaml.ScalarNode && n.ShortTag() != "!!null" {
		hint += ": write [" + show(n) + "]"
	}
	texts := []string{}
	for _, n := range o.list(key, hint) {
		s, _ := o.asText(n, n.Line, key)
		texts = append(texts, s)
	}
	if n := follow(o.fields[key].node); key == "per" && n.Kind == yaml.SequenceNode && len(texts) == 0 {
		o.reportKey(key, "must name an attribute: for one count of all write shared: true")
	}
	return texts
}

func (o *object) list(key, hint string) []*yaml.Node {
	n := follow(o.fields[key].node)
	if n.Kind != yaml.SequenceNode || n.ShortTag() != "!!seq" {
		o.reportKey(key, hint)
		return nil
	}
	return n.Content
}

// digits is stricter than YAML, whose parsers do not agree on 0777 and 1_000. It allows 1e-05, as Text writes it.
var digits = regexp.MustCompile(`^(0|[1-9][0-9]*)(\.[0-9]+)?(e[+-][0-9]+)?$`)

// scalar returns the text of a field, and whether it is a scalar with one of the tags.
func (o *object) scalar(key string, tags ...string) (text string, ok bool) {
	n := follow(o.fields[key].node)
	return n.Value, n.Kind == yaml.ScalarNode && slices.Contains(tags, n.ShortTag())
}

// whole reads a whole number. It returns false if the field cannot be used.
func (o *object) whole(key string, least, most int64) (int64, bool) {
	text, ok := o.scalar(key, "!!int")
	n, err := strconv.ParseInt(text, 10, 64)
	if !ok || err != nil || n < least || n > most || !digits.MatchString(text) {
		o.reportKey(key, fmt.Sprintf("must be a whole number, %d to %d, in plain digits", least, most))
		return 0, false
	}
	return n, true
}

func (o *object) number(key string) float64 {
	text, ok := o.scalar(key, "!!int", "!!float")
	number, err := strconv.ParseFloat(text, 64)
	if !ok || err != nil || number == 0 || !digits.MatchString(text) {
		o.reportKey(key, "must be a number above 0, in plain digits")
		return 0
	}
	return number
}

func (o *object) flag(key string) bool {
	text, ok := o.scalar(key, "!!bool")
	flag, err := strconv.ParseBool(text)
	if !ok || err != nil {
		o.reportKey(key, "must be true or false, without quotes")
	}
	return flag
}

func (o *object) duration(key string) time.Duration {
	if text, number := o.scalar(key, "!!int", "!!float"); number {
		o.reportKey(key, fmt.Sprintf("must have a unit: write %ss for seconds", text))
		return 0
	}
	text, ok := o.scalar(key, "!!str")
	duration, err := time.ParseDuration(text)
	if !ok || err != nil {
		o.reportKey(key, "must be a duration such as 500ms, 90s, 1m30s or 24h; h is the largest unit")
		return 0
	}
	if duration == 0 && key != "margin" && key != "period" { // a margin may be 0s, and package throttle reports a period
		o.reportKey(key, "must be above 0s: leave it out for the default")
	}
	return duration
}

// asText returns the text of a node. It reports a node that is no text or is empty.
func (o *object) asText(n *yaml.Node, line int, key string) (string, bool) {
	n = follow(n)
	if n.Kind == yaml.ScalarNode && n.ShortTag() == "!!str" && n.Value != "" {
		return n.Value, true
	}
	hint := "must be text, and not empty"
	if n.Kind == yaml.ScalarNode && n.Value != "" && n.ShortTag() != "!!null" {
		hint = fmt.Sprintf("must be text: write %q", quote.Short(n.Value))
	}
	o.unreadable[key] = true
	o.report(line, key+" "+show(n), hint)
	return "", false
}

// itemName names an item of a list by its name, or by its number if it has no name.
func itemName(kind string, n *yaml.Node, i int) string {
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
