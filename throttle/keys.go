package throttle

import (
	"fmt"
	"net/url"
	"strings"
)

// The shapes of all keys:
//
//	sluice:{TAG}:w:ATTRIBUTES:VALUES   the windows of one scope
//	sluice:{TAG}:n:NONCE               a call that was granted, settled or cancelled
//	sluice:{POLICY}:lines              who looks after which line of a policy
//	sluice:{TAG}:q                     how many wait in line; the line's other keys: lua/line.lua
//
// TAG is the policy, or POLICY:TENANT where every scope contains the tenant, so that tenants
// spread over a cluster. All keys of one script call share it. ATTRIBUTES and VALUES are lists
// in the same order, separated by commas. Values and nonces are data: every byte that is not a
// letter, a digit or one of _ . - ~ @ is written as %XX, so that no name can collide with
// another or reach beyond its own key.

func hashTag(policy, tenant string, shared bool) string {
	if shared {
		return "sluice:{" + policy + "}:"
	}
	return "sluice:{" + policy + ":" + escape(tenant) + "}:"
}

func nonceKey(tag, nonce string) string {
	return tag + "n:" + escape(nonce)
}

func linesKey(policy string) string { return "sluice:{" + policy + "}:lines" }

func lineKey(tag string) string { return tag + "q" }

func scopeKey(tag string, attributes, values []string) string {
	var b strings.Builder
	b.WriteString(tag)
	b.WriteString("w:")
	b.WriteString(strings.Join(attributes, ","))
	for i, v := range values {
		b.WriteByte(":,"[min(i, 1)])
		b.WriteString(escape(v))
	}
	return b.String()
}

func plain(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.IndexByte("_.-~@", c) >= 0
}

func escape(s string) string {
	for i := range len(s) {
		if !plain(s[i]) {
			return escapeFrom(s, i)
		}
	}
	return s
}

// unescape undoes escape. What escape cannot have made is returned as it is.
func unescape(s string) string {
	if name, err := url.PathUnescape(s); err == nil {
		return name
	}
	return s
}

func escapeFrom(s string, i int) string {
	var b strings.Builder
	b.WriteString(s[:i])
	for ; i < len(s); i++ {
		if plain(s[i]) {
			b.WriteByte(s[i])
		} else {
			fmt.Fprintf(&b, "%%%02X", s[i])
		}
	}
	return b.String()
}

// A Scope is whom a window counts: attributes with their values, in alphabetical order.
type Scope struct {
	Attributes []string
	Values     []string
}

// String is such as "tenant=acme,user=bob", or "shared" for a count shared by all.
func (s Scope) String() string {
	if len(s.Attributes) == 0 {
		return "shared"
	}
	parts := make([]string, len(s.Attributes))
	for i, a := range s.Attributes {
		parts[i] = a + "=" + printable(s.Values[i])
	}
	return strings.Join(parts, ",")
}
