package control

import (
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
	keep    bool
	store   *Store
	limiter *throttle.Limiter
	logger  *slog.Logger

	cancel context.CancelFunc
	done   sync.WaitGroup

	own    []throttle.Policy // of the program
	state  State             // as it was read last; if Redis has forgotten the policies, with those
	runs   int64             // the published version that is in force here; 0: its own policies
	offset time.Duration     // of the clock of Redis
	silent bool              // Redis did not answer last time
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
	f := &Follower{keep: c.KeepPolicies, store: c.Store, limiter: l, logger: l.Config().Logger, own: l.Policies()}
	f.look(ctx)
	ctx, f.cancel = context.WithCancel(context.WithoutCancel(ctx))
	f.done.Go(func() {
		for deaf := false; ctx.Err() == nil; {
			deaf = f.listen(ctx, deaf)
		}
	})
	return f, nil
}

// Close stops following. The policies, overrides and pauses in force stay.
func (f *Follower) Close() error {
	f.cancel()
	f.done.Wait()
	f.report(false)
	return nil
}

// listen subscribes, and looks when it hears of a change, until the subscription fails. It is deaf if it could
// not subscribe before, or cannot now.
func (f *Follower) listen(ctx context.Context, deaf bool) bool {
	sub := f.store.client.Subscribe(ctx, f.store.key("changed"))
	defer sub.Close()
	defer context.AfterFunc(ctx, func() { sub.Close() })()
	for {
		_, err := sub.ReceiveTimeout(ctx, f.untilNext())
		var timeout net.Error
		heard := err == nil
		if ctx.Err() != nil {
			return deaf
		}
		if !heard && !(errors.As(err, &timeout) && timeout.Timeout()) {
			if !deaf {
				f.logger.Warn("control: cannot hear of changes at once: looks for them every second", "err", err)
			}
			f.look(ctx)
			select {
			case <-ctx.Done():
			case <-time.After(lookAgain):
			}
			return true
		}
		deaf = false
		if changed := f.look(ctx); changed && !heard {
			return false // the subscription has missed it: a new one is needed
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
	before := f.state
	now, changed, err := f.store.read(ctx, before.mark)
	switch {
	case err == nil:
		f.silent = false
	case !f.silent && ctx.Err() != context.Canceled:
		f.silent = true
		f.logger.Warn("control: what is in force cannot be read: what was read last stays", "err", err)
	}
	if err != nil {
		changed, now.At = false, time.Now().Add(f.offset) // what has ended, has
	}
	f.offset = time.Until(now.At)
	switch {
	case !changed:
		at := now.At
		now = before
		now.Interventions = before.InForce(at)
	case now.Version == 0 && before.Version > 0:
		if !f.keep {
			f.logger.Warn("control: Redis has forgotten the published policies: those before stay in force")
		}
		now.Policies, now.Removed, now.Version, now.epoch = before.Policies, before.Removed, before.Version, before.epoch
	}
	f.state = now
	was, _ := before.Effective()
	policies, rest := now.Effective()
	switch {
	case now.Version != before.Version || now.epoch != before.epoch && now.Version > 0:
		f.publish()
	case f.runs > 0 && policies != nil && !reflect.DeepEqual(was, policies):
		_ = f.put()
	}
	if !reflect.DeepEqual(before.Overrides, now.Overrides) || !reflect.DeepEqual(before.Pauses, now.Pauses) {
		f.limiter.SetInterventions(rest)
		f.log(before, now)
	}
	f.report(true)
	return changed
}

// report notes for other processes which policies this one runs, or no longer.
func (f *Follower) report(here bool) {
	if f.silent {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), readTimeout)
	defer cancel()
	runs := "its own policies " + digest(f.own)
	if f.runs > 0 {
		runs = fmt.Sprintf("published version %d", f.runs)
	}
	key, member := f.store.key("processes"), runs+"\n"+f.limiter.Config().Name
	_, _ = f.store.client.Pipelined(ctx, func(pipe redis.Pipeliner) error { // the next look does it again
		if !here {
			return pipe.ZRem(ctx, key, member).Err()
		}
		now := time.Now().Add(f.offset)
		pipe.ZAdd(ctx, key, redis.Z{Score: float64(now.Unix()), Member: member})
		pipe.ZRemRangeByScore(ctx, key, "0", fmt.Sprint(now.Add(-reportedFor).Unix()))
		return pipe.Expire(ctx, key, reportedFor).Err()
	})
}

// publish puts newly published policies in force, and warns if they are not those of the program.
func (f *Follower) publish() {
	goes := "published"
	if f.keep {
		goes = "own"
	}
	if differs := Differences(f.own, f.state.Policies); f.state.PoliciesErr == nil && len(f.own) > 0 && differs != "" {
		f.logger.Warn("control: the policies of this program are not those that are published",
			"own", digest(f.own), "published", f.state.Version, "in force", goes, "differs", differs)
	}
	if f.keep {
		return
	}
	err := f.put()
	if err == nil {
		f.report(false)
		f.runs = f.state.Version
	}
	f.limiter.Config().Observer.Followed(f.state.Version, err)
}

// put puts published policies in force, with what holds for all tenants.
func (f *Follower) put() error {
	policies, _ := f.state.Effective()
	err := f.state.PoliciesErr
	if err == nil {
		err = f.limiter.SetPolicies(policies, f.state.Removed...)
	}
	if err != nil {
		f.logger.Error("control: published policies cannot be used: those before stay in force",
			"version", f.state.Version, "err", err)
	}
	return err
}

// log logs which overrides and pauses have begun, and which have ended.
func (f *Follower) log(before, now State) {
	was, is := before.describe(), now.describe()
	for of, text := range is {
		if was[of] != text {
			f.logger.Info("control: in force", "policy", of.policy, "tenant", of.tenant, "what", text)
		}
	}
	for of, text := range was {
		if is[of] == "" {
			f.logger.Info("control: ended", "policy", of.policy, "tenant", of.tenant, "what", text)
		}
	}
}
