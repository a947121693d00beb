package policyfile

import (
	"errors"
	"strings"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/sluice-go/sluice/throttle"
)

// A Description is policies with every default written out: as JSON with their warnings, or by Text
// as a policy file.
type Description struct {
	Policies []policyText `json:"policies" yaml:"policies"`
}

type (
	policyText struct {
		Name           string                `json:"name" yaml:"name"`
		Match          []string              `json:"match" yaml:"match,flow,omitempty"`
		Mode           throttle.Mode         `json:"mode" yaml:"mode"`
		Fail           throttle.FailMode     `json:"fail" yaml:"fail"`
		Requeue        throttle.Requeue      `json:"requeue" yaml:"requeue"`
		Upstream       throttle.Upstream     `json:"upstream" yaml:"upstream"`
		Adapt          throttle.Adapt        `json:"adapt" yaml:"adapt"`
		MaxPause       string                `json:"max_pause" yaml:"max_pause"`
		MaxRefusals    int64                 `json:"max_refusals,omitempty" yaml:"max_refusals,omitempty"`
		MaxRefusedWait string                `json:"max_refused_wait,omitempty" yaml:"max_refused_wait,omitempty"`
		BatchShare     float64               `json:"batch_share" yaml:"batch_share"`
		Shards         int                   `json:"shards" yaml:"shards"`
		Windows        []windowText          `json:"windows" yaml:"windows"`
		Tenants        map[string]tenantText `json:"tenants" yaml:"tenants,omitempty"`
		Warnings       []string              `json:"warnings" yaml:"-"`
	}
	windowText struct {
		Name      string             `json:"name" yaml:"name"`
		Limit     int64              `json:"limit" yaml:"limit"`
		Period    string             `json:"period,omitempty" yaml:"period,omitempty"`
		Resets    string             `json:"resets,omitempty" yaml:"resets,omitempty"`
		Timezone  string             `json:"timezone,omitempty" yaml:"timezone,omitempty"`
		Unit      string             `json:"unit" yaml:"unit"`
		Per       []string           `json:"per" yaml:"per"`
		Algorithm throttle.Algorithm `json:"algorithm" yaml:"algorithm"`
		Anchor    throttle.Anchor    `json:"anchor,omitempty" yaml:"anchor,omitempty"`
		Burst     int64              `json:"burst,omitempty" yaml:"burst,omitempty"`
		Lease     string             `json:"lease,omitempty" yaml:"lease,omitempty"`
		Margin    string             `json:"margin,omitempty" yaml:"margin,omitempty"`
	}
	tenantText struct {
		Exempt  bool                    `json:"exempt" yaml:"exempt,omitempty"`
		Weight  float64                 `json:"weight" yaml:"weight"`
		Windows map[string]overrideText `json:"windows" yaml:"windows,omitempty"`
	}
	overrideText struct {
		Burst int64 `json:"burst,omitempty" yaml:"burst,omitempty"`
		Limit int64 `json:"limit,omitempty" yaml:"limit,omitempty"`
	}
)

// Describe returns what policies mean.
func Describe(policies []throttle.Policy) Description {
	found := Description{Policies: []policyText{}}
	for _, p := range policies {
		p = p.WithDefaults()
		c := policyText{
			Name: p.Name, Match: append([]string{}, p.Match...), Mode: p.Mode, Fail: p.Fail,
			Requeue: p.Requeue, Upstream: p.Upstream, Adapt: p.Adapt, MaxPause: written(p.MaxPause),
			MaxRefusals: p.MaxRefusals, MaxRefusedWait: written(p.MaxRefusedWait), BatchShare: p.BatchShare,
			Shards: p.Shards, Tenants: map[string]tenantText{}, Warnings: append([]string{}, p.Warnings()...),
		}
		for _, w := range p.Windows {
			c.Windows = append(c.Windows, windowText{
				Name: w.Name, Limit: w.Limit, Period: written(w.Period), Resets: w.Resets, Timezone: w.Timezone,
				Unit: w.Unit, Per: w.Scope.Attributes(), Algorithm: w.Algorithm, Anchor: w.Anchor, Burst: w.Burst,
				Lease: written(w.Lease), Margin: written(w.Margin),
			})
		}
		for name, t := range p.Tenants {
			own := tenantText{Exempt: t.Exempt, Weight: t.Weight, Windows: map[string]overrideText{}}
			for window, o := range t.Windows {
				own.Windows[window] = overrideText(o)
			}
			c.Tenants[name] = own
		}
		found.Policies = append(found.Policies, c)
	}
	return found
}

// written is a duration as a policy file has it, if there is one: "1m", not "1m0s".
func written(d time.Duration) string {
	if d == 0 {
		return ""
	}
	text := d.String()
	for _, zero := range []string{"m0s", "h0m"} {
		if strings.HasSuffix(text, zero) {
			text = text[:len(text)-2]
		}
	}
	return text
}

// inline puts each window and each tenant on a line. They are four levels below the file.
func inline(n *yaml.Node, depth int) {
	if depth >= 4 {
		n.Style |= yaml.FlowStyle
	}
	for _, inner := range n.Content {
		inline(inner, depth+1)
	}
}

// Text returns a policy file. Warnings are comments at its end.
func (d Description) Text() string {
	var file yaml.Node
	err := file.Encode(d)
	inline(&file, 0)
	text, failed := yaml.Dump(&file, yaml.WithIndent(2), yaml.WithLineWidth(-1))
	if err = errors.Join(err, failed); err != nil {
		panic(err) // it holds nothing that YAML does not know
	}
	for _, p := range d.Policies {
		for _, warning := range p.Warnings {
			text = append(text, "# warning: "+warning+"\n"...)
		}
	}
	return string(text)
}
