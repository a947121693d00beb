package limitertest

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

// LineZero is the rank before the first.
const LineZero = 1 << 52

// A LineState is a line as its keys have it (internal/script/lua/line.lua).
type LineState struct {
	Keys   map[string]bool // all of the line: whether each has a TTL
	Values map[string]string
	Hashes map[string]map[string]string
	Sets   map[string]map[string]float64
}

// ReadLine reads all keys of a line, but no keys of windows, nor records of calls.
func ReadLine(t TB, client *redis.Client) LineState {
	t.Helper()
	const prefix = "sluice:{p}:"
	keys, err := client.Keys(t.Context(), prefix+"*").Result()
	expect.Must(t, err)
	return read(t, client, prefix, slices.DeleteFunc(keys, func(key string) bool {
		name := strings.TrimPrefix(key, prefix)
		kind, _, part := strings.Cut(name, ":")
		if kind == "n" {
			return !strings.Contains(name, "|")
		}
		return !part && !slices.Contains([]string{"f", "k", "l", "q", "t", "u", "z"}, kind) ||
			part && !slices.Contains([]string{"d", "f", "g", "m"}, kind)
	}))
}

// read reads keys, whatever their types.
func read(t TB, client *redis.Client, prefix string, keys []string) LineState {
	t.Helper()
	ctx := t.Context()
	kinds, ttls := make([]*redis.StatusCmd, len(keys)), make([]*redis.DurationCmd, len(keys))
	_, err := client.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for i, key := range keys {
			kinds[i], ttls[i] = pipe.Type(ctx, key), pipe.TTL(ctx, key)
		}
		return nil
	})
	expect.Must(t, err)
	found, err := client.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for i, key := range keys {
			switch kind := kinds[i].Val(); kind {
			case "string":
				pipe.Get(ctx, key)
			case "hash":
				pipe.HGetAll(ctx, key)
			case "zset":
				pipe.ZRangeWithScores(ctx, key, 0, -1)
			case "none":
				pipe.Ping(ctx) // it has gone since
			default:
				t.Fatalf("%q is a %s", key, kind)
			}
		}
		return nil
	})
	expect.Require(t, err == nil || errors.Is(err, redis.Nil), err)
	st := LineState{Keys: map[string]bool{}, Values: map[string]string{}, Hashes: map[string]map[string]string{}, Sets: map[string]map[string]float64{}}
	for i, key := range keys {
		name := strings.TrimPrefix(key, prefix)
		st.Keys[name] = ttls[i].Val() > 0
		switch value := found[i].(type) {
		case *redis.StringCmd:
			st.Values[name] = value.Val()
		case *redis.MapStringStringCmd:
			st.Hashes[name] = value.Val()
		case *redis.ZSliceCmd:
			st.Sets[name] = map[string]float64{}
			for _, z := range value.Val() {
				st.Sets[name][z.Member.(string)] = z.Score
			}
		}
	}
	return st
}

// A count has the units that wait somewhere, by unit, and the number of tickets under "tickets".
type count map[string]int64

func (c count) add(units, times string) {
	n, _ := strconv.ParseInt(times, 10, 64)
	c["tickets"] += n
	for part := range strings.SplitSeq(units, ",") {
		// "requests=1" is the cost of each ticket. In "requests=3/1/2" the 3 is the cost of all.
		unit, text, _ := strings.Cut(part, "=")
		sum, _, several := strings.Cut(text, "/")
		cost, _ := strconv.ParseInt(sum, 10, 64)
		if !several {
			cost *= n
		}
		if cost > 0 {
			c[unit] += cost
		}
	}
}

// counts are by what they count: "flow NAME", "node NAME", "queue NAME".
type counts map[string]count

func (c counts) add(what, name, units, times string) {
	if c[what+name] == nil {
		c[what+name] = count{}
	}
	c[what+name].add(units, times)
}

// Faults lists where the counts in a line's keys differ from the tickets and units that wait: expected starts go by the
// counts. (A flow that waits at a wrong node, or at none, is never taken.) Only withTTL, keys must have a TTL.
func (st LineState) Faults(withTTL bool) (faults []string) {
	tickets, flows, counted, waits := st.Hashes["t"], st.Hashes["f"], counts{}, counts{}
	scopes := map[string][]string{} // by flow, as suffixes
	onlyTenants := true
	for flow, record := range flows {
		fields := append(strings.Fields(strings.Split(record, ";")[0]), make([]string, 8)...)
		counted.add("flow ", flow, fields[1], fields[0])
		side, _, _ := strings.Cut(flow, "|") // its queue, of its class
		waits.add("queue ", side, "flows=1/,weights="+fields[2]+"/", "0")
		scopes[flow] = strings.Split(fields[7], "+")
		for _, suffix := range scopes[flow] {
			attributes, _, _ := strings.Cut(strings.TrimPrefix(suffix, "w:"), ":")
			onlyTenants = onlyTenants && (attributes == "" || attributes == "tenant")
		}
	}
	for node, record := range st.Hashes["u"] {
		fields := append(strings.Fields(record), "", "", "")
		counted.add("node ", node, fields[2], fields[0])
	}
	for queue, record := range st.Hashes["z"] {
		if fields := append(strings.Fields(record), make([]string, 13)...); fields[1] != "0" {
			counted.add("queue ", queue, fmt.Sprintf("%s,flows=%s/,weights=%s/", fields[12], fields[8], fields[2]), fields[1])
		}
	}
	if n, _, _ := strings.Cut(st.Values["q"], " "); n != "" {
		counted.add("line", "", "", n)
	}
	for ticket, record := range tickets {
		fields := append(strings.Split(record[min(16, len(record)):], " "), "")
		costs := cmp.Or(fields[0], "requests=1")
		queue, _, _ := strings.Cut(ticket, "/")
		flow := queue + fields[1]
		side, _, _ := strings.Cut(flow, "|")
		waits.add("line", "", "", "1")
		waits.add("flow ", flow, costs, "1")
		waits.add("queue ", side, costs, "1")
		for _, suffix := range scopes[flow] {
			if suffix != "w:" && !onlyTenants {
				waits.add("node ", side+"|"+suffix, costs, "1")
			}
		}
	}
	for name, ttl := range st.Keys {
		if len(tickets) == 0 && name != "k" || withTTL && !ttl {
			faults = append(faults, fmt.Sprintf("%q is there for %d tickets, with a TTL: %v", name, len(tickets), ttl))
		}
	}
	names := maps.Clone(waits)
	maps.Copy(names, counted)
	for name := range names {
		if !maps.Equal(waits[name], counted[name]) {
			faults = append(faults, fmt.Sprintf("of %q %v wait, and %v are counted", name, waits[name], counted[name]))
		}
	}
	slices.Sort(faults)
	return faults
}

// Agrees fails the test if the keys of the line do not agree with each other.
func Agrees(t TB, client *redis.Client) {
	t.Helper()
	if faults := ReadLine(t, client).Faults(false); len(faults) > 0 {
		t.Fatalf("the line does not agree:\n%s", strings.Join(faults, "\n"))
	}
}

// IsGone fails the test if anything of a line is left, but for takes that are not acknowledged.
func IsGone(t TB, client *redis.Client) {
	t.Helper()
	for name := range ReadLine(t, client).Keys {
		expect.That(t, name == "k", name, "is left")
	}
}
