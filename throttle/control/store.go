// Package control changes limits while programs run. A Store keeps published policies, overrides of
// tenants, operators' pauses, and a log of all changes in the limiter's Redis. A limiter follows it:
//
//	store := control.StoreOf(limiter)
//	follower := store.Follow(ctx, control.FollowConfig{})
//	defer follower.Close()
//
// docs/howto/change-limits.md shows it by task.
package control

import (
	"cmp"
	"context"
	"crypto/rand"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/quote"
)

// Bounds, all inclusive.
const (
	maxInForce  = 1000   // overrides and pauses together
	maxWeight   = 1e6    // a tenant of this weight goes first
	maxChanges  = 10_000 // in the log: older ones are deleted
	MaxWhoBytes = 200
	MaxWhyBytes = 500
)

// A Store keeps what is in force in Redis. It is safe for concurrent use.
type Store struct{ limiter *throttle.Limiter }

// StoreOf returns the store of all limiters with the Client and Prefix of this one. It does not call Redis.
func StoreOf(l *throttle.Limiter) *Store { return &Store{l} }

func (s *Store) client() redis.UniversalClient { return s.limiter.Config().Client }

// key returns a key of the store. No policy has a "!" in its name, so no policy's key is the same.
func (s *Store) key(name string) string {
	return s.limiter.Config().Prefix + "sluice:{!control}:" + name
}

// An Author names who makes a change, and gives the reason. Both are kept in the log, and in State.
type Author struct {
	Who string `json:"who"` // required: 1 to MaxWhoBytes bytes
	Why string `json:"why"` // required: 1 to MaxWhyBytes bytes
}

// An InputError names the invalid argument of a change, and what would be valid.
type InputError string

func (e InputError) Error() string { return "control: " + string(e) }

func invalid(format string, args ...any) error { return InputError(fmt.Sprintf(format, args...)) }

func (a Author) validate() error {
	switch {
	case strings.TrimSpace(a.Who) == "" || len(a.Who) > MaxWhoBytes:
		return invalid("who %q: must be 1 to %d bytes: who makes the change", quote.Short(a.Who), MaxWhoBytes)
	case strings.TrimSpace(a.Why) == "" || len(a.Why) > MaxWhyBytes:
		return invalid("why %q: must be 1 to %d bytes: the reason of the change", quote.Short(a.Why), MaxWhyBytes)
	}
	return nil
}

// State has the policies, overrides and pauses in force. Redis keeps policies as the JSON of a State.
type State struct {
	throttle.Interventions `json:"-"`

	Policies    []throttle.Policy // the published ones, with their defaults; nil if none were published
	Removed     []throttle.Policy `json:",omitempty"` // published earlier, as they were last: for tickets that still wait
	PoliciesErr error             `json:"-"`          // why Policies cannot be read: perhaps this program is too old
	Version     int64             `json:"-"`          // of Policies, for Publish: Change.Version of their change, or 0
	mark        string            // of the last change
	published   string            // version and JSON of the policies in Redis: after a loss of data versions may recur
}

var (
	//go:embed lua/change.lua
	changeText   string
	changeScript = redis.NewScript(changeText)

	//go:embed lua/read.lua
	readText   string
	readScript = redis.NewScript(readText)
)

// State reads what is in force. The error may wrap an error of Redis.
func (s *Store) State(ctx context.Context) (State, error) {
	return s.read(ctx, State{mark: "unknown"})
}

// read reads what is in force. If nothing has changed since `known` was read, Redis sends only the time.
func (s *Store) read(ctx context.Context, known State) (state State, err error) {
	reply, err := readScript.Run(ctx, s.client(), []string{s.key("state")}, known.mark).StringSlice()
	us, noTime := strconv.ParseInt(append(reply, "")[0], 10, 64) // fails without a reply
	if err = cmp.Or(err, noTime); err != nil {
		return state, fmt.Errorf("control: reading what is in force: %w", err)
	}
	if len(reply) == 1 { // only the time
		known.Interventions = known.InForce(time.UnixMicro(us))
		return known, nil
	}
	state.mark = reply[1]
	for _, pair := range slices.SortedFunc(slices.Chunk(reply[2:], 2), slices.Compare) {
		if err := state.addField(pair[0], pair[1]); err != nil {
			return state, err
		}
	}
	state.Interventions = state.InForce(time.UnixMicro(us))
	return state, nil
}

// fieldOf returns the field of the state for an override or a pause. The kind is Overridden or Paused.
func fieldOf(kind, policy, tenant string) string {
	return kind + " " + policy + " " + url.QueryEscape(tenant)
}

// addField reads a field of the state: a number, and JSON. Fields that only newer programs know are left out.
func (s *State) addField(field, value string) error {
	kind, names, _ := strings.Cut(field, " ")
	_, escaped, _ := strings.Cut(names, " ")
	tenant, badName := url.QueryUnescape(escaped) // not from JSON, which has only UTF-8
	number, text, _ := strings.Cut(value, " ")
	versionOrEnd, err := strconv.ParseInt(number, 10, 64)
	switch kind {
	case "policies":
		s.Version, s.published = versionOrEnd, value
		s.decodePolicies(text)
	case Paused:
		p := throttle.Pause{ByHand: true}
		err = cmp.Or(err, badName, json.Unmarshal([]byte(text), &p))
		p.Tenant, p.Until = tenant, time.UnixMicro(versionOrEnd).UTC()
		s.Pauses = append(s.Pauses, p)
	case Overridden:
		var o throttle.TenantOverride
		err = cmp.Or(err, badName, json.Unmarshal([]byte(text), &o))
		o.Tenant, o.Until = tenant, time.UnixMicro(versionOrEnd).UTC()
		s.Overrides = append(s.Overrides, o)
	default:
		return nil
	}
	if err != nil {
		return fmt.Errorf("control: %q cannot be read: %w", quote.Short(field), err)
	}
	return nil
}

// decodePolicies reads policies strictly: a program that does not know one of their fields keeps its present policies.
func (s *State) decodePolicies(text string) {
	strict := json.NewDecoder(strings.NewReader(text))
	strict.DisallowUnknownFields()
	if err := strict.Decode(s); err != nil {
		s.Policies, s.Removed = nil, nil
		s.PoliciesErr = fmt.Errorf("control: published policies cannot be read: %w: they are for a newer release, or damaged", err)
	}
}

// Processes returns the sorted names (throttle.Config.Name) of the processes that follow, keyed by the policies that they
// run, such as "published version 3" or "its own policies 1a2b3c4d". The error wraps that of Redis.
func (s *Store) Processes(ctx context.Context) (map[string][]string, error) {
	members, err := s.client().ZRange(ctx, s.key("processes"), 0, -1).Result()
	if err != nil {
		return nil, fmt.Errorf("control: reading the processes: %w", err)
	}
	slices.Sort(members)
	processes := map[string][]string{}
	for _, member := range members {
		runs, name, _ := strings.Cut(member, "\n")
		processes[runs] = append(processes[runs], name)
	}
	return processes, nil
}

// ErrConflict is wrapped by Publish's error if somebody else has published since the version was read.
var ErrConflict = errors.New("control: other policies were published meanwhile: look at them, and publish again")

// Publish puts policies in force on all limiters that follow. They replace the policies of a version, 0
// if none were published. It returns the new version, or the same one if nothing differs.
//
// It fails for no policies, with a *throttle.PolicyError, with ErrConflict, or with an error that names Author's field.
// Other errors wrap one of Redis, after which the policies may be in force all the same.
func (s *Store) Publish(ctx context.Context, policies []throttle.Policy, version int64, author Author) (int64, error) {
	if len(policies) == 0 {
		return 0, errors.New("control: no policies: must be at least one, as none would guard nothing")
	}
	next, err := s.newLimiter(policies)
	if err = cmp.Or(author.validate(), err); err != nil {
		return 0, err
	}
	for _, p := range policies { // JSON would change the names
		for tenant := range p.Tenants {
			if !utf8.ValidString(tenant) {
				return 0, &throttle.PolicyError{Policy: p.Name, Tenant: tenant, Field: "name", Value: tenant,
					Hint: "must be UTF-8 to be published: use SetOverride"}
			}
		}
		if match := strings.Join(p.Match, " "); !utf8.ValidString(match) {
			return 0, &throttle.PolicyError{Policy: p.Name, Field: "match", Value: match, Hint: "must be UTF-8 to be published"}
		}
	}
	old, err := s.State(ctx)
	if err != nil {
		return 0, err
	}
	removed, err := s.removed(ctx, old, next.Lines())
	if err != nil {
		return 0, err
	}
	text, _ := json.Marshal(State{Policies: next.Policies(), Removed: removed}) // newLimiter has accepted them
	change := Change{Kind: Published, Author: author, Policies: policies, Text: Differences(old.Policies, policies)}
	if old.PoliciesErr != nil {
		change.Text = "replaces policies that could not be read"
	} else if change.Text == "" && old.Version == version {
		return version, nil
	}
	return s.change(ctx, write{field: "policies", value: string(text), replaces: version}, change)
}

// removed returns policies with a line that is not in `lines`: published ones, and removed ones with tickets in line.
func (s *Store) removed(ctx context.Context, old State, lines []string) (removed []throttle.Policy, err error) {
	for i, p := range slices.Concat(old.Policies, old.Removed) {
		l, err := s.newLimiter([]throttle.Policy{p})
		if err != nil {
			return nil, err
		}
		keep := false
		for _, line := range l.Lines() {
			waiting, err := l.Line(line).Len(ctx)
			if err != nil {
				return nil, err
			}
			keep = keep || !slices.Contains(lines, line) && (waiting > 0 || i < len(old.Policies))
		}
		if keep {
			removed = append(removed, p)
			lines = append(lines, l.Lines()...)
		}
	}
	return removed, nil
}

// newLimiter returns a limiter that has these policies, or a *throttle.PolicyError.
func (s *Store) newLimiter(policies []throttle.Policy) (*throttle.Limiter, error) {
	return throttle.New(throttle.Config{Client: s.client(), Policies: policies, Prefix: s.limiter.Config().Prefix})
}

// A write is what a change does to the state. The zero value writes nothing.
type write struct {
	field, value string        // the value "" deletes the field
	ttl          time.Duration // of an override or a pause
	replaces     int64         // the version of the policies before
}

// change makes a write, and logs it as a Change. It returns the new version, or 0 if the field to delete was not there.
func (s *Store) change(ctx context.Context, w write, c Change) (version int64, err error) {
	if err := c.Author.validate(); err != nil {
		return 0, err
	}
	c.ID = rand.Text()          // until it is read: see change.lua
	entry, _ := json.Marshal(c) // strings, and policies that were encoded before
	keys := []string{s.key("state"), s.key("log")}
	reply, err := changeScript.Run(ctx, s.client(), keys, w.field, w.value, w.ttl.Microseconds(), w.replaces,
		maxInForce, entry, maxChanges).Int64Slice()
	if len(reply) != 2 {
		return 0, fmt.Errorf("control: making a change: %d values: %w", len(reply), cmp.Or(err, throttle.ErrReply))
	}
	switch reply[0] {
	case 1: // done
		return reply[1], nil
	case 2: // conflict
		return 0, fmt.Errorf("%w: version %d was to be replaced, and %d is in force", ErrConflict, w.replaces, reply[1])
	}
	return 0, fmt.Errorf("control: %d overrides and pauses are in force: must be at most %d: clear some", reply[1], maxInForce)
}
