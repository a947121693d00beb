package script

import (
	"cmp"
	"crypto/sha256"
	"encoding/base64"
	"net/url"
	"strings"

	"github.com/google/uuid"
)

// Keys of a line and of package usage. A line's hash tag lets one call reach all of its keys. PREFIX is
// throttle.Config.Prefix:
//
//	PREFIXsluice:{LINE}:w:ATTRIBUTES:VALUES   the windows of one scope
//	PREFIXsluice:{LINE}:q                     the line's count; a call names it
//	PREFIXsluice:{LINE}:none                  never exists; calls on a Cluster name it too
//	PREFIXsluice:{POLICY}:[hy]:SECONDS        package usage
//
// LINE is the policy's name, followed by the shard if there are several: NAME/3of4. The other keys are described in
// lua/decide.lua, lua/verbs.lua, lua/line.lua and lua/line_order.lua.
//
// ATTRIBUTES and VALUES are lists in the same order, separated by commas. Values are data, and
// escaped: no name can collide with another or reach beyond its own key.

// Prefix returns the beginning of all keys of a line. Neither argument has a brace, so no two lines share a beginning.
func Prefix(prefix, line string) string { return prefix + "sluice:{" + line + "}:" }

// PolicyOf returns the name of the policy that a line belongs to.
func PolicyOf(line string) string { return strings.SplitN(line, "/", 2)[0] }

// ScopeKey returns the key of one scope, without the prefix.
func ScopeKey(attributes, values []string) string { return scopeKeys(attributes, escapeAll(values)) }

// scopeKeys returns such a key, or a pattern of keys. Values are escaped, or patterns.
func scopeKeys(attributes []string, values string) string {
	if len(attributes) == 0 {
		return "w:"
	}
	return "w:" + strings.Join(attributes, ",") + ":" + values
}

// escapeAll returns values as a list.
func escapeAll(values []string) string {
	escaped := make([]string, len(values))
	for i, v := range values {
		escaped[i] = Escape(v)
	}
	return strings.Join(escaped, ",")
}

// ParseScopes returns, by attribute, the values in keys that ScopeKey made, joined by "+".
func ParseScopes(keys string) map[string]string {
	all := map[string]string{}
	for key := range strings.SplitSeq(keys, "+") {
		names, values, _ := strings.Cut(strings.TrimPrefix(key, "w:"), ":")
		list := strings.Split(values, ",")
		for i, name := range strings.Split(names, ",") {
			if i < len(list) && name != "" {
				all[name] = Unescape(list[i])
			}
		}
	}
	return all
}

// TicketName returns the name of a ticket in its line. The queue is escaped, or Taker.Claims. IDs that are UUIDs, as
// asynq's are, take 23 bytes instead of 36: "!", which no escaped name has, and base64.
func TicketName(queue, id string) string {
	if u, err := uuid.Parse(id); err == nil && u.String() == id { // else it is no UUID, or in another form
		return queue + "/!" + base64.RawURLEncoding.EncodeToString(u[:])
	}
	return queue + "/" + Escape(id)
}

func parseTicket(name string) (queue, id string, ok bool) {
	queue, id, ok = strings.Cut(name, "/")
	packed, isUUID := strings.CutPrefix(id, "!")
	if !isUUID {
		return Unescape(queue), Unescape(id), ok
	}
	bytes, errBase64 := base64.RawURLEncoding.DecodeString(packed)
	u, errLength := uuid.FromBytes(bytes)
	return Unescape(queue), u.String(), errBase64 == nil && errLength == nil
}

// FlowMark returns a prefix for the values in the names of a policy's flows, so that tickets that joined by other scopes
// wait in other flows. It is empty for the commonest scopes: that of the tenant alone, with or without the shared one.
func FlowMark(scopes []Scope) string {
	attributes := ""
	for _, scope := range scopes {
		attributes = strings.TrimSpace(attributes + " " + scope.Attributes)
	}
	if attributes == "tenant" {
		return ""
	}
	sum := sha256.Sum256([]byte(attributes))
	return "!" + base64.RawURLEncoding.EncodeToString(sum[:3])
}

// Flow returns the name of a flow: tickets of one queue with the same class, mark and values wait in it. The
// queue is escaped, or Taker.Claims.
func Flow(queue string, batch bool, mark string, values []string) string {
	if batch {
		queue += "!"
	}
	if mark != "" {
		mark += ","
	}
	return queue + "|" + mark + escapeAll(values)
}

// ParseFlow undoes Flow.
func ParseFlow(flow string) (queue string, batch bool, mark string, values []string) {
	queue, list, _ := strings.Cut(flow, "|")
	queue, batch = strings.CutSuffix(queue, "!")
	if strings.HasPrefix(list, "!") {
		mark, list, _ = strings.Cut(list, ",")
	}
	for v := range strings.SplitSeq(list, ",") {
		values = append(values, Unescape(v))
	}
	return Unescape(queue), batch, mark, values
}

// Escape writes a name with only letters, digits and _ . - ~ %. It never returns "-", which stands for an empty word.
func Escape(s string) string {
	if s == "-" {
		return "%2D"
	}
	return strings.ReplaceAll(url.QueryEscape(s), "+", "%20")
}

// Unescape undoes Escape. A text that Escape cannot have made is returned as it is.
func Unescape(s string) string {
	if s == "-" {
		return ""
	}
	if name, err := url.PathUnescape(s); err == nil {
		return name
	}
	return s
}

func word(s string) string { return cmp.Or(Escape(s), "-") }
