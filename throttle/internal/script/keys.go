package script

import (
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"net/url"
	"strings"

	"github.com/google/uuid"
)

// The shapes of all keys of a policy. One hash tag lets one script call reach all of them. PREFIX
// is throttle.Config.Prefix:
//
//	PREFIXsluice:{LINE}:w:ATTRIBUTES:VALUES   the windows of one scope
//	PREFIXsluice:{LINE}:q                     the line's count; a call names it
//	PREFIXsluice:{LINE}:none                  never exists; calls on a Cluster name it too
//	PREFIXsluice:{POLICY}:y:SECONDS           package usage
//
// LINE is the policy's name, and behind it its shard if it has several: NAME/3of4.
//
// The scripts derive every other key: see lua/scope.lua, lua/decide.lua, lua/verbs.lua
// and lua/line.lua.
//
// ATTRIBUTES and VALUES are lists in the same order, separated by commas. Values are data, and
// escaped: no name can collide with another or reach beyond its own key.

// Prefix returns the beginning of all keys of a line. No two pairs have the same: neither part holds
// a brace.
func Prefix(prefix, line string) string { return prefix + "sluice:{" + line + "}:" }

// ScopeKey returns the key of one scope, without the prefix.
func ScopeKey(attributes, values []string) string {
	var b strings.Builder
	b.WriteString("w:")
	b.WriteString(strings.Join(attributes, ","))
	for i, v := range values {
		b.WriteByte(":,"[min(i, 1)])
		b.WriteString(Escape(v))
	}
	return b.String()
}

// ParseScopes returns the attributes of keys that ScopeKey made, by "+".
func ParseScopes(keys string) map[string]string {
	all := map[string]string{}
	for key := range strings.SplitSeq(keys, "+") {
		names, values, _ := strings.Cut(strings.TrimPrefix(key, "w:"), ":")
		list := strings.Split(values, ",")
		for i, name := range strings.Split(names, ",") {
			if i < len(list) {
				all[name] = Unescape(list[i])
			}
		}
	}
	return all
}

// TicketName returns the name of a ticket in its line. The queue is escaped, or Taker.Claims.
// IDs that are UUIDs, as asynq's are, take 23 bytes in place of 36: "!", which no escaped name
// holds, and base64.
func TicketName(queue, id string) string {
	if u, err := uuid.Parse(id); err == nil && u.String() == id { // else it is no UUID, or in another form
		return queue + "/!" + base64.RawURLEncoding.EncodeToString(u[:])
	}
	return queue + "/" + Escape(id)
}

func parseTicket(name string) (queue, id string, ok bool) {
	queue, id, ok = strings.Cut(name, "/")
	packed, short := strings.CutPrefix(id, "!")
	if !short {
		return Unescape(queue), Unescape(id), ok
	}
	bytes, err := base64.RawURLEncoding.DecodeString(packed)
	if err != nil {
		return "", "", false
	}
	u, err := uuid.FromBytes(bytes)
	return Unescape(queue), u.String(), err == nil
}

// FlowMark returns the beginning of the values of a policy's flows, so that tickets which joined by
// other scopes wait in other flows. The tenant alone, which most policies have, has none. What all
// share does not differ.
func FlowMark(scopes []Scope) string {
	var own []string
	for _, scope := range scopes {
		if scope.Attributes != "" {
			own = append(own, scope.Attributes)
		}
	}
	switch {
	case len(own) == 0:
		return "!"
	case len(own) == 1 && own[0] == "tenant":
		return ""
	}
	sum := sha256.Sum256([]byte(strings.Join(own, " ")))
	return "!" + base64.RawURLEncoding.EncodeToString(sum[:3])
}

// Flow returns the name of the flow in which tickets of a queue wait that have the same class, mark
// and values. The queue is escaped, or Taker.Claims.
func Flow(queue string, batch bool, mark string, values []string) string {
	var b strings.Builder
	b.WriteString(queue)
	if batch {
		b.WriteByte('!')
	}
	b.WriteByte('|')
	b.WriteString(mark)
	for i, v := range values {
		if i > 0 || mark != "" {
			b.WriteByte(',')
		}
		b.WriteString(Escape(v))
	}
	return b.String()
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

func plain(c rune) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' ||
		strings.ContainsRune("_.-~@", c)
}

// Escape writes a name so that it holds only letters, digits and _ . - ~ @ %.
func Escape(s string) string {
	if !strings.ContainsFunc(s, func(r rune) bool { return !plain(r) }) {
		return s
	}
	var b strings.Builder
	for _, c := range []byte(s) {
		if plain(rune(c)) {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

// Unescape undoes Escape. A text that Escape cannot have made is returned as it is.
func Unescape(s string) string {
	if name, err := url.PathUnescape(s); err == nil {
		return name
	}
	return s
}

// escapeWord is Escape for a word between spaces, where "-" stands for nothing.
func escapeWord(s string) string {
	if s == "-" {
		return "%2D"
	}
	return dash(Escape(s))
}

func unescapeWord(s string) string {
	if s == "-" {
		return ""
	}
	return Unescape(s)
}
