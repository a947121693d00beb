package control

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"reflect"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

const (
	// lookEvery is the time after which a follower looks that has heard of no change.
	lookEvery = 10 * time.Second

	// lookAgain is the same while it cannot subscribe.
	lookAgain = time.Second

	readTimeout = 2 * time.Second
)

// FollowConfig configures Follow.
type FollowConfig struct {
	// KeepPolicies has the limiter keep its own policies, and follow overrides and pauses only.
	KeepPolicies bool

	// Store is followed by its limiter. It is required. The limiter's Logger gets each change that
	// is put in force, and policies that cannot be used. Its Observer.Followed is called for each
	// version.
	Store *Store
}

// A Follower keeps a limiter up to date with a Store.
type Follower struct {
	config  FollowConfig
	limiter *throttle.Limiter
	logger  *slog.Logger

	cancel context.CancelFunc
	done   sync.WaitGroup

	own       []throttle.Policy // of the program
	runs      string            // which policies are in force here
	published bool              // published ones are
	state     State             // as it was read last
	offset    time.Duration
	version   string // of the policies that were looked at last, whether or not they are in force
	reported  string // that this process runs
	silent    bool   // Redis did not answer last time
	deaf      bool   // it cannot subscribe
}

// Follow keeps a limiter up to date with its Store, from now until Close. It reads the Store once
// before it returns. While Redis does not answer, or nothing was published, the limiter has its own
// policies.
//
// Every change is in force within a second, or within 10 seconds if a message of Redis is lost.
// Policies that cannot be used are logged, and those before stay in force, as they do if Redis
// forgets what was published.
//
// The error names the field that is invalid.
func Follow(ctx context.Context, c FollowConfig) (*Follower, error) {
	if c.Store == nil {
		return nil, errors.New("control: FollowConfig.Store is nil: must be what NewStore returns")
	}
	l := c.Store.of
	f := &Follower{config: c, limiter: l, logger: l.Config().Logger, own: l.Policies()}
	f.runs = "its own policies " + digest(f.own)
	f.look(ctx)
	ctx, f.cancel = context.WithCancel(context.WithoutCancel(ctx))
	f.done.Go(func() {
		for ctx.Err() == nil {
			f.listen(ctx)
		}
	})
	return f, nil
}

// Close stops following. The policies, overrides and pauses in force stay.
func (f *Follower) Close() error {
	f.cancel()
	f.done.Wait()
	f.report("")
	return nil
}

// listen subscribes, and looks when it hears of a change, until the subscription fails.
func (f *Follower) listen(ctx context.Context) {
	sub := f.config.Store.client.Subscribe(ctx, f.config.Store.key("changed"))
	defer sub.Close()
	defer context.AfterFunc(ctx, func() { sub.Close() })()
	for {
		_, err := sub.ReceiveTimeout(ctx, f.untilNext())
		var timeout net.Error
		heard := err == nil
		if ctx.Err() != nil {
			return
		}
		if !heard && !(errors.As(err, &timeout) && timeout.Timeout()) {
			if !f.deaf {
				f.deaf = true
				f.logger.Warn("control: cannot hear of changes at once: looks for them every second", "err", err)
			}
			f.look(ctx)
			select {
			case <-ctx.Done():
			case <-time.After(lookAgain):
			}
			return
		}
		f.deaf = false
		if changed := f.look(ctx); changed && !heard {
			return // the subscription has missed it: a new one is needed
		}
	}
}

// untilNext returns when to look next: at the end of an override or a pause, or after lookEvery.
func (f *Follower) untilNext() time.Duration {
	next, now := lookEvery, time.Now().Add(f.offset)
	for _, o := range f.state.Overrides {
		next = min(next, o.Until.Sub(now))
	}
	for _, p := range f.state.Pauses {
		next = min(next, p.Until.Sub(now))
	}
	return max(next, time.Millisecond)
}

// look reads the state, and puts it in force. It reports whether it has changed since the last
// time.
func (f *Follower) look(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	state, changed, err := f.config.Store.read(ctx, f.state.mark)
	if err != nil {
		if ctx.Err() != context.Canceled && !f.silent {
			f.silent = true
			f.logger.Warn("control: what is in force cannot be read: what was read last stays", "err", err)
		}
		changed = false
		state.At = time.Now().Add(f.offset) // what has ended, has
	} else {
		f.silent = false
	}
	if !changed {
		at := state.At
		state = f.state
		state.Interventions = state.InForce(at)
	}
	f.offset = time.Until(state.At)
	before := f.state
	f.state = state
	if changed {
		f.publish(state, before)
	}
	if !reflect.DeepEqual(before.Overrides, state.Overrides) || !reflect.DeepEqual(before.Pauses, state.Pauses) {
		now := state
		if state.Version == 0 { // Redis has forgotten what was published
			now.Policies, now.Removed = before.Policies, before.Removed
		}
		was, _ := before.Effective()
		policies, rest := now.Effective()
		f.limiter.SetInterventions(rest)
		if f.published && policies != nil && !reflect.DeepEqual(was, policies) {
			_ = f.put(now)
		}
		f.log(before, state)
	}
	f.report(f.runs)
	return changed
}

// report notes for other processes which policies this one runs, or with "" that it has ended.
func (f *Follower) report(runs string) {
	if f.silent {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), readTimeout)
	defer cancel()
	store, name := f.config.Store, f.limiter.Config().Name
	_, _ = store.client.Pipelined(ctx, func(pipe redis.Pipeliner) error { // the next look does it again
		if f.reported != "" && f.reported != runs {
			pipe.ZRem(ctx, store.key("processes"), f.reported+"\n"+name)
		}
		if f.reported = runs; runs != "" {
			now := time.Now().Add(f.offset)
			pipe.ZAdd(ctx, store.key("processes"), redis.Z{Score: float64(now.Unix()), Member: runs + "\n" + name})
			pipe.ZRemRangeByScore(ctx, store.key("processes"), "0", fmt.Sprint(now.Add(-reportedFor).Unix()))
			pipe.Expire(ctx, store.key("processes"), reportedFor)
		}
		return nil
	})
}

// publish puts policies in force, if they are new, and warns if they are not those of the program.
func (f *Follower) publish(state, before State) {
	version := fmt.Sprint(state.epoch, " ", state.Version)
	switch {
	case state.Version == 0 && before.Version > 0:
		if !f.config.KeepPolicies {
			f.logger.Warn("control: Redis has forgotten the published policies: those before stay in force")
		}
		return
	case state.Version == 0 || version == f.version:
		return
	}
	f.version = version
	err, goes := state.PoliciesErr, "published"
	if f.config.KeepPolicies {
		goes = "own"
	}
	if differs := Differences(f.own, state.Policies); err == nil && len(f.own) > 0 && differs != "" {
		f.logger.Warn("control: the policies of this program are not those that are published",
			"own", digest(f.own), "published", state.Version, "in force", goes, "differs", differs)
	}
	if f.config.KeepPolicies {
		return
	}
	if err = f.put(state); err == nil {
		f.runs, f.published = fmt.Sprintf("published version %d", state.Version), true
	}
	f.limiter.Config().Observer.Followed(state.Version, err)
}

// put puts published policies in force, with what holds for all tenants.
func (f *Follower) put(state State) error {
	policies, _ := state.Effective()
	err := state.PoliciesErr
	if err == nil {
		err = cmp.Or(f.limiter.SetPolicies(policies), f.limiter.SetRemoved(state.Removed))
	}
	if err != nil {
		f.logger.Error("control: published policies cannot be used: those before stay in force",
			"version", state.Version, "err", err)
	}
	return err
}

// log logs which overrides and pauses have begun, and which have ended.
func (f *Follower) log(before, now State) {
	was, is := before.describe(), now.describe()
	for about, text := range is {
		if was[about] != text {
			f.logger.Info("control: in force", "policy", about.Policy, "tenant", about.Tenant, "what", text)
		}
	}
	for about, text := range was {
		if is[about] == "" {
			f.logger.Info("control: ended", "policy", about.Policy, "tenant", about.Tenant, "what", text)
		}
	}
}
