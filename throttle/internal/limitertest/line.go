package limitertest

import (
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

// RankOf is the rank in a ticket's record.
func RankOf(record string) int64 {
	rank, err := strconv.ParseInt(record[:16], 10, 64)
	if err != nil {
		panic(err)
	}
	return rank
}

// A LineState is a line as its keys hold it (internal/script/lua/line.lua).
type LineState struct {
	Keys   map[string]bool // all of the line: whether each has a TTL
	Values map[string]string
	Hashes map[string]map[string]string
	Sets   map[string]map[string]float64
}

// ReadLine reads all keys of a line: not those of windows, nor what is known of calls.
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
			part && !slices.Contains([]string{"d", "f", "g"}, kind)
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

// A tally is what a flow or a node has to count.
type tally struct {
	tickets int
	units   map[string][]int64 // by unit: what each ticket costs
}

func (c *tally) add(costs string) {
	c.tickets++
	if c.units == nil {
		c.units = map[string][]int64{}
	}
	for _, cost := range strings.Split(costs, ",") {
		if unit, n, ok := strings.Cut(cost, "="); ok {
			units, _ := strconv.ParseInt(n, 10, 64)
			c.units[unit] = append(c.units[unit], units)
		}
	}
}

// differs tells how "requests=1" or "requests=3/1/2" is not what was counted.
func (c *tally) differs(tickets, text string) string {
	if tickets != strconv.Itoa(c.tickets) {
		return fmt.Sprintf("says %s tickets, there are %d", tickets, c.tickets)
	}
	said := map[string]bool{}
	for _, part := range strings.Split(text, ",") {
		unit, n, ok := strings.Cut(part, "=")
		if !ok {
			continue
		}
		said[unit] = true
		var sum, least, most, want int64
		if strings.Contains(n, "/") {
			if _, err := fmt.Sscanf(n, "%d/%d/%d", &sum, &least, &most); err != nil {
				return err.Error()
			}
		} else {
			least, _ = strconv.ParseInt(n, 10, 64)
			sum, most = least*int64(c.tickets), least
			if len(c.units[unit]) != c.tickets {
				return fmt.Sprintf("says that all %d cost %s, there are %v", c.tickets, part, c.units)
			}
		}
		for _, n := range c.units[unit] {
			want += n
			if n < least || n > most {
				return fmt.Sprintf("says %s, and one costs %d", part, n)
			}
		}
		if sum != want {
			return fmt.Sprintf("says %s, there are %d", part, want)
		}
	}
	for unit := range c.units {
		if !said[unit] {
			return fmt.Sprintf("says %q, and nothing of %s", text, unit)
		}
	}
	return ""
}

// Faults lists what in the keys of a line does not agree with the tickets in it. A test's keys
// have a TTL only where days are kept: withTTL.
func (st LineState) Faults(withTTL bool) (faults []string) {
	fault := func(format string, args ...any) { faults = append(faults, fmt.Sprintf(format, args...)) }
	tickets, records, facts, queues := st.Hashes["t"], st.Hashes["f"], st.Hashes["u"], st.Hashes["z"]
	if n, _, _ := strings.Cut(st.Values["q"], " "); len(tickets) > 0 && n != strconv.Itoa(len(tickets)) {
		fault("q is %q for %d tickets", st.Values["q"], len(tickets))
	}
	if len(tickets) == 0 {
		for name := range st.Keys {
			if name != "k" {
				fault("nobody is in line, but there is %q", name)
			}
		}
	}
	for name, ttl := range st.Keys {
		if withTTL && !ttl {
			fault("%q has no TTL", name)
		}
	}
	flows, nodes, of := map[string]*tally{}, map[string]*tally{}, map[string]*tally{}
	ranks := map[string]map[string]float64{} // by flow and ticket
	count := func(in map[string]*tally, name, costs string) {
		if in[name] == nil {
			in[name] = &tally{}
		}
		in[name].add(costs)
	}
	onlyTenants := true
	suffixes := func(record string) []string {
		return strings.Split(strings.Fields(strings.Split(record, ";")[0])[8], "+")
	}
	for _, record := range records {
		for _, suffix := range suffixes(record) {
			attributes, _, _ := strings.Cut(strings.TrimPrefix(suffix, "w:"), ":")
			onlyTenants = onlyTenants && (attributes == "" || attributes == "tenant")
		}
	}
	for ticket, record := range tickets {
		fields := strings.Split(record[min(16, len(record)):], " ")
		if len(fields) != 3 || !strings.HasPrefix(strings.TrimPrefix(fields[1], "!"), "|") {
			fault("ticket %q has the record %q", ticket, record)
			continue
		}
		costs := fields[0]
		if costs == "" {
			costs = "requests=1"
		}
		queue, _, _ := strings.Cut(ticket, "/")
		flow := queue + fields[1]
		queue, _, _ = strings.Cut(flow, "|") // its side of the class
		count(flows, flow, costs)
		count(of, queue, costs)
		if ranks[flow] == nil {
			ranks[flow] = map[string]float64{}
		}
		ranks[flow][ticket] = float64(RankOf(record))
		own := strings.Fields(records[flow])
		if len(own) < 9 {
			fault("flow %q has the record %q", flow, records[flow])
			continue
		}
		if !onlyTenants {
			for _, suffix := range suffixes(records[flow]) {
				if suffix != "w:" {
					count(nodes, queue+"|"+suffix, costs)
				}
			}
		}
		count(nodes, queue+"|w:", costs)
	}
	if len(faults) > 0 {
		return faults
	}

	weights, many := map[string]int64{}, map[string]int{}
	members := map[string]string{} // of nodes, by flow: "NODE MEMBER"
	for name, set := range st.Sets {
		node, ok := strings.CutPrefix(name, "n:")
		if !ok {
			continue
		}
		for member, score := range set {
			rank, flow, _ := strings.Cut(member, " ")
			if members[flow] != "" {
				fault("flow %q waits at %q and at %q", flow, members[flow], node)
			}
			members[flow] = node + " " + member
			if attributes := strings.Split(node, ":")[1]; attributes == "tenant" && fmt.Sprintf("%.0f", score) != strings.TrimLeft(rank, "0") {
				fault("%q waits at %q by %f", member, node, score)
			}
		}
		queue, suffix, _ := strings.Cut(node, "|")
		if _, ok := st.Sets["d:"+queue][suffix]; !ok {
			fault("flows wait at %q, which is never due", node)
		}
	}
	for flow, record := range records {
		if flows[flow] == nil {
			fault("flow %q has a record, but no ticket", flow)
			continue
		}
		fields := strings.Fields(strings.Split(record, ";")[0])
		queue, _, _ := strings.Cut(flow, "|")
		weight, _ := strconv.ParseInt(fields[3], 10, 64)
		weights[queue] += weight
		many[queue]++
		if how := flows[flow].differs(fields[0], fields[1]); how != "" {
			fault("flow %q %s", flow, how)
		}
		if !maps.Equal(st.Sets["f:"+flow], ranks[flow]) {
			fault("flow %q has %v, by ticket %v", flow, st.Sets["f:"+flow], ranks[flow])
		}
		first := fmt.Sprintf("%016.0f", slices.Min(slices.Collect(maps.Values(ranks[flow]))))
		if want := queue + "|" + fields[5] + " " + first + " " + flow; members[flow] != want || fields[6] != first {
			fault("flow %q waits as %q, want %q; its record is %q", flow, members[flow], want, record)
		}
		delete(members, flow)
	}
	for flow := range members {
		fault("flow %q waits at %q, and has no tickets", flow, members[flow])
	}
	for name := range st.Sets {
		if flow, ok := strings.CutPrefix(name, "f:"); ok && flows[flow] == nil {
			fault("%q is left", name)
		}
		if node, ok := strings.CutPrefix(name, "g:"); ok && nodes[node] == nil {
			fault("%q is left", name)
		}
		if queue, ok := strings.CutPrefix(name, "d:"); ok && queues[queue] == "" {
			fault("%q is left", name)
		}
	}
	for name, node := range nodes {
		fields := append(strings.Fields(facts[name]), "", "", "")
		if queue, root := strings.CutSuffix(name, "|w:"); root {
			record := append(strings.Fields(queues[queue]), make([]string, 13)...)
			fields = []string{record[1], record[11], record[12]}
		}
		if how := node.differs(fields[0], fields[2]); how != "" {
			fault("node %q %s", name, how)
		}
	}
	for node := range facts {
		if nodes[node] == nil || strings.HasSuffix(node, "|w:") {
			fault("u has %q, where nobody waits", node)
		}
	}
	for queue, record := range queues {
		fields := append(strings.Fields(record), "", "", "", "", "", "", "", "", "")
		n := 0
		if of[queue] != nil {
			n = of[queue].tickets
		}
		if fields[1] != strconv.Itoa(n) || fields[2] != strconv.FormatInt(weights[queue], 10) || fields[8] != strconv.Itoa(many[queue]) {
			fault("queue %q is %q, it has %d tickets of %d flows and %d", queue, record, n, many[queue], weights[queue])
		}
	}
	for queue := range of {
		if queues[queue] == "" {
			fault("z has nothing of %q", queue)
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
