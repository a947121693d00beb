package control

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/sluice-go/sluice/throttle"
)

// A document is how policies are stored. It is read strictly: a program that does not know one of
// its fields keeps the policies that it has.
type document struct {
	Policies []throttle.Policy
	Removed  []throttle.Policy `json:",omitempty"` // for which somebody may wait
}

func encodePolicies(policies, removed []throttle.Policy) (string, error) {
	d := document{Removed: removed}
	for _, p := range policies {
		for tenant := range p.Tenants {
			if !utf8.ValidString(tenant) { // JSON would hold another name
				return "", &throttle.PolicyError{Policy: p.Name, Tenant: tenant, Field: "name", Value: tenant,
					Hint: "must be UTF-8 to be published: use SetOverride"}
			}
		}
		d.Policies = append(d.Policies, p.WithDefaults())
	}
	data, err := json.Marshal(d)
	if err != nil {
		return "", fmt.Errorf("control: %w", err)
	}
	return string(data), nil
}

// digest tells versions of a program's own policies apart.
func digest(policies []throttle.Policy) string {
	text, _ := encodePolicies(policies, nil)
	return fmt.Sprintf("%x", sha256.Sum256([]byte(text)))[:8]
}

func decodePolicies(text string) (policies, removed []throttle.Policy, err error) {
	var d document
	strict := json.NewDecoder(strings.NewReader(text))
	strict.DisallowUnknownFields()
	if err := strict.Decode(&d); err != nil {
		return nil, nil, fmt.Errorf("control: published policies cannot be read: %w: they are for a newer release, or damaged", err)
	}
	return d.Policies, d.Removed, nil
}
