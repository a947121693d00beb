package policyfile

import (
	"cmp"
	"errors"
	"reflect"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/sluice-go/sluice/throttle"
)

// A Description has policies with every default written out. Each policy is the mapping that a policy
// file has for it: Text returns such a file.
type Description struct {
	Policies []map[string]any `json:"policies" yaml:"policies"`
}

// Describe returns policies with every default written out.
func Describe(policies []throttle.Policy) Description {
	d := Description{[]map[string]any{}}
	for _, p := range policies {
		d.Policies = append(d.Policies, written(reflect.ValueOf(p.WithDefaults())).(map[string]any))
	}
	return d
}

// written returns a value as a policy file has it. Zero fields are left out.
func written(v reflect.Value) any {
	if value, ok := v.Interface().(time.Duration); ok {
		return short(value)
	}
	switch v.Kind() {
	case reflect.Struct:
		fields := map[string]any{}
		for i := range v.NumField() {
			value, key := v.Field(i), keyOf(v.Type().Field(i))
			empty := value.Kind() == reflect.Map && value.Len() == 0
			if !value.IsZero() && !empty {
				fields[key] = written(value)
			}
		}
		return fields
	case reflect.Map:
		fields := map[string]any{}
		for key, value := range v.Seq2() {
			fields[key.String()] = written(value)
		}
		return fields
	case reflect.Slice:
		var list []any
		for _, value := range v.Seq2() {
			list = append(list, written(value))
		}
		return list
	}
	return v.Interface()
}

// short returns a duration as people write it: "1m", not "1m0s".
func short(d time.Duration) string {
	text := d.String()
	for _, zero := range []string{"m0s", "h0m"} {
		if strings.HasSuffix(text, zero) {
			text = text[:len(text)-2]
		}
	}
	return text
}

// ranks order the keys of a mapping. Other keys have rank 0, and are sorted by name.
var ranks = map[string]int{"name": -4, "match": -3, "limit": -2, "period": -1, "windows": 1, "tenants": 2}

// arrange puts keys in an order for readers, and each window, tenant and list of texts on a line.
func arrange(n *yaml.Node, depth int) {
	texts := n.Kind == yaml.SequenceNode && len(n.Content) > 0 && n.Content[0].Kind == yaml.ScalarNode
	if depth >= 4 || texts {
		n.Style |= yaml.FlowStyle
	}
	if n.Kind == yaml.MappingNode {
		pairs := slices.Collect(slices.Chunk(n.Content, 2))
		slices.SortStableFunc(pairs, func(a, b []*yaml.Node) int {
			return cmp.Compare(ranks[a[0].Value], ranks[b[0].Value])
		})
		n.Content = slices.Concat(pairs...)
	}
	for _, inner := range n.Content {
		arrange(inner, depth+1)
	}
}

// Text returns the policies as the text of a policy file.
func (d Description) Text() string {
	var file yaml.Node
	err := file.Encode(d)
	arrange(&file, 0)
	text, failed := yaml.Dump(&file, yaml.WithIndent(2), yaml.WithLineWidth(-1))
	if err = errors.Join(err, failed); err != nil {
		panic(err) // it has nothing that YAML does not know
	}
	return string(text)
}
