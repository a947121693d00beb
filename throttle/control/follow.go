package control

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"log/slog"
	"reflect"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

const (
	listed, unlisted = true, false            // what report does
	unpublished      = 0                      // a Follower's version while the program's own policies are in force
	lookEvery        = 500 * time.Millisecond // how often a follower asks whether something has changed
	readTimeout      = 2 * time.Second
	reportEvery      = 10 * time.Second // how often a follower reports that it still follows
	reportedFor      = time.Minute      // how long a process is listed after its last report
)

// FollowConfig configures Store.Follow.
type FollowConfig struct {
	// KeepPolicies lets the limiter keep its own policies. It still follows all pauses, and overrides of single tenants.
	KeepPolicies bool
}

// A Follower keeps a limiter up to date with a Store.
type Follower struct {
	config FollowConfig
	store  *Store
	logger *slog.Logger

	cancel context.CancelFunc
	done   sync.WaitGroup

	ownPolicies []throttle.Policy // the program's
	state       State             // the last one; its policies stay when Redis has forgotten them
	version     int64             // the published version that is in force here, or unpublished
	reported    time.Time         // when report last wrote the version; zero: look reports it at once
	offset      time.Duration     // how far the clock of Redis is ahead of this machine's
	readFailed  bool              // by the last look
}

// Follow keeps the limiter of a Store up to date with it, from now until Close. It reads the Store
// once before it returns. Until published policies have been read, the limiter has its own.
//
// Every change is in force within a second. The limiter's Observer is told of each version, unless KeepPolicies is
// set. Policies that cannot be used are logged, and the earlier ones stay in force. They also stay if Redis forgets
// what was published.
func (s *Store) Follow(ctx context.Context, c FollowConfig) *Follower {
	f := &Follower{config: c, store: s, logger: s.limiter.Config().Logger, ownPolicies: s.limiter.Policies()}
	f.look(ctx)
	ctx, f.cancel = context.WithCancel(context.WithoutCancel(ctx))
	f.done.Go(func() {
		for tick := time.Tick(lookEvery); ctx.Err() == nil; f.look(ctx) {
			select {
			case <-tick:
			case <-ctx.Done():
			}
		}
	})
	return f
}

// Close stops following. The policies, overrides and pauses in force stay.
func (f *Follower) Close() {
	f.cancel()
	f.done.Wait()
	f.report(unlisted)
}

// look reads the state, and puts into force what has changed.
func (f *Follower) look(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	previous := f.state
	state, err := f.store.read(ctx, previous)
	if ctx.Err() == context.Canceled {
		return
	}
	state = f.keep(previous, state, err)
	offset := time.Until(state.At)
	clockSet := (offset - f.offset).Abs() > readTimeout // of Redis, or of this machine
	f.state, f.readFailed, f.offset = state, err != nil, offset
	isNew := state.published != previous.published
	policies, others := state.Effective()
	previousPolicies, _ := previous.Effective()
	overridden := f.version != unpublished && !reflect.DeepEqual(previousPolicies, policies)
	if isNew || overridden {
		if err := f.adopt(policies, isNew); err != nil && isNew {
			f.state = previous                  // by the old mark the next look reads all again,
			f.state.published = state.published // but does not try these policies again
		}
	}
	same := reflect.DeepEqual(previous.Overrides, state.Overrides) && reflect.DeepEqual(previous.Pauses, state.Pauses)
	if clockSet || !same {
		f.store.limiter.SetInterventions(others)
	}
	if time.Since(f.reported) >= reportEvery {
		f.report(listed)
	}
}

// keep adds what stays in force of the previous state: all that has not ended if the read failed, else policies, if none came.
func (f *Follower) keep(previous, state State, err error) State {
	switch {
	case err != nil:
		if !f.readFailed {
			f.logger.Warn("control: what is in force cannot be read: what was read last stays", "err", err)
		}
		state = previous
		state.Interventions = previous.InForce(time.Now().Add(f.offset))
	case state.published == "" && previous.published != "":
		if !f.config.KeepPolicies {
			f.logger.Warn("control: Redis has forgotten the published policies: those before stay in force")
		}
		state.Policies, state.Removed, state.Version = previous.Policies, previous.Removed, previous.Version
		state.published = previous.published
	case state.published == previous.published: // if these could not be used, those before are kept
		state.Policies, state.Removed, state.PoliciesErr = previous.Policies, previous.Removed, nil
	}
	return state
}

// adopt puts published policies in force, with overrides for all tenants. For a new version it warns if the program's
// own policies differ.
func (f *Follower) adopt(policies []throttle.Policy, isNew bool) error {
	err := f.state.PoliciesErr
	if isNew && err == nil && len(f.ownPolicies) > 0 {
		if differs := Differences(f.ownPolicies, f.state.Policies); differs != "" {
			f.logger.Warn("control: the policies of this program are not those that are published",
				"own", digest(f.ownPolicies), "published", f.state.Version, "keeps its own", f.config.KeepPolicies, "differs", differs)
		}
	}
	if f.config.KeepPolicies {
		return nil
	}
	if err == nil {
		err = f.store.limiter.SetPolicies(policies, f.state.Removed...)
	}
	if err != nil {
		f.logger.Error("control: published policies cannot be used: those before stay in force",
			"version", f.state.Version, "err", err)
	} else if isNew {
		f.report(unlisted) // under the old version: look reports the new one
		f.version, f.reported = f.state.Version, time.Time{}
	}
	if isNew {
		f.store.limiter.Config().Observer(throttle.Publication{Err: err, Version: f.state.Version})
	}
	return err
}

// report lists this process under the policies that it runs, for Store.Processes, or removes it from there.
func (f *Follower) report(list bool) {
	if f.readFailed {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), readTimeout)
	defer cancel()
	runs := fmt.Sprintf("published version %d", f.version)
	if f.version == unpublished {
		runs = "its own policies " + digest(f.ownPolicies)
	}
	key, member := f.store.key("processes"), runs+"\n"+f.store.limiter.Config().Name
	_, _ = f.store.client().Pipelined(ctx, func(pipe redis.Pipeliner) error { // the next report does it again
		if !list {
			return pipe.ZRem(ctx, key, member).Err()
		}
		now := time.Now().Add(f.offset)
		pipe.ZAdd(ctx, key, redis.Z{Score: float64(now.Unix()), Member: member})
		pipe.ZRemRangeByScore(ctx, key, "0", fmt.Sprint(now.Add(-reportedFor).Unix()))
		return pipe.Expire(ctx, key, reportedFor).Err()
	})
	f.reported = time.Now()
}

// digest tells versions of a program's own policies apart.
func digest(policies []throttle.Policy) string {
	text, _ := json.Marshal(policies)
	return fmt.Sprintf("%x", sha256.Sum256(text))[:8]
}
