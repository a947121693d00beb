package throttle_test

import (
	"encoding/binary"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

// besidesUnits are the fields of u that no ticket accounts for.
var besidesUnits = regexp.MustCompile("^(v .*|t .*|rank|front|limits|limits at)$")

// A lineState is a line as its keys hold it (lua/line.lua).
type lineState struct {
	calls   map[string]float64            // c
	count   int                           // q
	due     map[string]float64            // d
	flows   map[string]string             // f
	keys    []string                      // all of the line, without windows and nonces
	nodes   map[string]map[string]float64 // n:
	places  map[string]string             // a
	tickets map[string]string             // t
	units   map[string]string             // u
	waiting map[string]map[string]float64 // f:
	windows map[string]string             // w:
}

func readLineState(t tb, client *redis.Client, prefix string) lineState {
	t.Helper()
	ctx := t.Context()
	keys, err := client.Keys(ctx, prefix+"*").Result()
	if err != nil {
		t.Fatal(err)
	}
	st := lineState{nodes: map[string]map[string]float64{}, waiting: map[string]map[string]float64{}, windows: map[string]string{}}
	pipe := client.Pipeline()
	scores := map[string]*redis.ZSliceCmd{}
	hashes := map[string]*redis.MapStringStringCmd{}
	values := map[string]*redis.StringCmd{}
	for _, key := range keys {
		name := strings.TrimPrefix(key, prefix)
		switch {
		case name == "lines":
			continue
		case strings.HasPrefix(name, "w:"):
			values[name] = pipe.Get(ctx, key)
			continue
		case strings.HasPrefix(name, "n:") && !strings.HasPrefix(name, "n:w:"):
			continue // a nonce
		case name == "q":
			values[name] = pipe.Get(ctx, key)
		case name == "c", name == "d", strings.HasPrefix(name, "f:"), strings.HasPrefix(name, "n:"):
			scores[name] = pipe.ZRangeWithScores(ctx, key, 0, -1)
		default:
			hashes[name] = pipe.HGetAll(ctx, key)
		}
		st.keys = append(st.keys, name)
	}
	if _, err := pipe.Exec(ctx); err != nil {
		t.Fatal(err)
	}
	set := func(name string) map[string]float64 {
		all := map[string]float64{}
		if scores[name] != nil {
			for _, z := range scores[name].Val() {
				all[z.Member.(string)] = z.Score
			}
		}
		return all
	}
	hash := func(name string) map[string]string {
		if hashes[name] == nil {
			return map[string]string{}
		}
		return hashes[name].Val()
	}
	st.calls, st.due = set("c"), set("d")
	st.flows, st.places, st.tickets, st.units = hash("f"), hash("a"), hash("t"), hash("u")
	slices.Sort(st.keys)
	for name, value := range values {
		if name == "q" {
			count, _ := strconv.Atoi(value.Val())
			st.count = count - 1_000_000_000_000 // which is the line's format
		} else {
			st.windows[name] = value.Val()
		}
	}
	for name := range scores {
		if flow, ok := strings.CutPrefix(name, "f:"); ok {
			st.waiting[flow] = set(name)
		} else if suffix, ok := strings.CutPrefix(name, "n:"); ok {
			st.nodes[suffix] = set(name)
		}
	}
	return st
}

// heldUnits reads the sections "/UNIT" of a scope's value (lua/state.lua).
func heldUnits(value string, now int64) map[string]int64 {
	seven := func(s string) int64 { return int64(binary.BigEndian.Uint64([]byte("\x00" + s[:7]))) }
	held := map[string]int64{}
	for rest := value[min(8, len(value)):]; rest != ""; {
		n := int(rest[0])
		name, head := rest[1:1+n], rest[1+n:]
		size := int(head[8])<<16 | int(head[9])<<8 | int(head[10])
		if unit, ok := strings.CutPrefix(name, "/"); ok && seven(head[1:]) > now {
			if units := seven(head[11:]); units > 0 {
				held[unit] = units
			}
		}
		rest = head[11+size:]
	}
	return held
}

// faults lists what in the keys of a line does not agree with the tickets in it. With windows,
// what is held has to agree too.
func (st lineState) faults(now int64, windows []throttle.Window) []string {
	var faults []string
	fault := func(format string, args ...any) { faults = append(faults, fmt.Sprintf(format, args...)) }
	if st.count != len(st.tickets) {
		fault("q is %d for %d tickets", st.count, len(st.tickets))
	}
	if len(st.tickets) == 0 && len(st.keys) > 0 {
		fault("nobody is in line, but there are %q", st.keys)
	}
	units := map[string]int64{} // what u must hold
	held := map[string]int64{}  // "SUFFIX UNIT"
	lapsed := false             // some hold has ended that no call has seen yet
	first := map[string]int64{} // rank of a flow's first waiter
	waiting := map[string]map[string]float64{}
	calls := map[string]bool{}
	counted := map[string]bool{} // "ATTRIBUTES UNIT" that are held for
	for _, w := range windows {
		w = w.WithDefaults()
		counted[strings.Join(w.Per, ",")+" "+w.Unit] = true
	}
	flowOf := func(id string) (weight int64, suffixes []string) {
		head, _, _ := strings.Cut(st.flows[id], ";")
		fields := strings.Split(head, " ")
		if len(fields) < 3 {
			fault("flow %q has the record %q", id, st.flows[id])
			return 0, nil
		}
		weight, _ = strconv.ParseInt(fields[0], 10, 64)
		return weight, fields[2:]
	}
	flows := map[string]bool{}
	for ticket, record := range st.tickets {
		fields := strings.Split(record, " ")
		if len(fields) != 6 {
			fault("ticket %q has the record %q", ticket, record)
			continue
		}
		state, flow := fields[0], fields[4]
		rank, _ := strconv.ParseInt(fields[1], 10, 64)
		weight, suffixes := flowOf(flow)
		if !flows[flow] {
			flows[flow] = true
			units["w"] += weight
		}
		units["c "+flow]++
		costs := map[string]int64{}
		for _, cost := range strings.Split(fields[5], ",") {
			if unit, n, ok := strings.Cut(cost, "="); ok {
				costs[unit], _ = strconv.ParseInt(n, 10, 64)
			}
		}
		if state != "w" {
			calls[ticket] = true
			lapsed = lapsed || st.calls[ticket] <= float64(now)
			if _, ok := st.calls[ticket]; !ok {
				fault("ticket %q is called, but not in c", ticket)
			}
			for _, suffix := range suffixes {
				attributes := strings.Split(suffix, ":")[1]
				for unit, n := range costs {
					if state == "c" && counted[attributes+" "+unit] {
						held[suffix+" "+unit] += n
					}
				}
			}
			continue
		}
		if waiting[flow] == nil {
			waiting[flow], first[flow] = map[string]float64{}, rank
		}
		waiting[flow][ticket] = float64(rank)
		first[flow] = min(first[flow], rank)
		for unit, n := range costs {
			units["f "+flow+" "+unit] += n
			for _, suffix := range suffixes {
				units["n "+suffix+" "+unit] += n
			}
		}
	}
	for id := range st.flows {
		if !flows[id] {
			fault("flow %q has a record, but no ticket", id)
		}
	}
	if len(st.calls) != len(calls) {
		fault("%d in c, %d called or skipped", len(st.calls), len(calls))
	}
	if !maps.EqualFunc(st.waiting, waiting, maps.Equal) {
		fault("waiting by flow is %v, by ticket %v", st.waiting, waiting)
	}
	for field, n := range units {
		if st.units[field] != strconv.FormatInt(n, 10) {
			fault("u says of %q %q, want %d", field, st.units[field], n)
		}
	}
	for field, n := range st.units {
		if _, ok := units[field]; !ok && !besidesUnits.MatchString(field) {
			fault("u says of %q %q, want nothing", field, n)
		}
	}
	placed := 0
	for suffix, members := range st.nodes {
		placed += len(members)
		if _, ok := st.due[suffix]; !ok {
			fault("flows wait at %q, which is never due", suffix)
		}
	}
	if placed != len(st.places) || placed != len(waiting) {
		fault("%d flows at nodes, %d in a, %d with waiters", placed, len(st.places), len(waiting))
	}
	for flow := range waiting {
		suffix, member, _ := strings.Cut(st.places[flow], " ")
		if want := fmt.Sprintf("%016d %s", 1<<52+first[flow], flow); member != want {
			fault("flow %q is in a as %q, want %q", flow, member, want)
		}
		if _, ok := st.nodes[suffix][member]; !ok {
			fault("flow %q does not wait at %q", flow, suffix)
		}
	}
	if windows != nil && !lapsed {
		for suffix, value := range st.windows {
			for unit, n := range heldUnits(value, now) {
				if want := held[suffix+" "+unit]; want != n {
					fault("%d %s are held at %q, want %d", n, unit, suffix, want)
				}
				delete(held, suffix+" "+unit)
			}
		}
		for name, n := range held {
			if n > 0 {
				fault("nothing is held of %q, want %d", name, n)
			}
		}
	}
	slices.Sort(faults)
	return faults
}
