package control

import (
	"context"
	"fmt"
	"log/slog"
	"reflect"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

const (
	// lookEvery is how often a follower asks whether something has changed.
	lookEvery = 500 * time.Millisecond

	// reportEvery is how often it says that it is still here.
	reportEvery = 10 * time.Second

	readTimeout = 2 * time.Second
)

// FollowConfig configures Store.Follow.
type FollowConfig struct {
	// KeepPolicies has the limiter keep its own policies, and follow overrides and pauses only.
	KeepPolicies bool
}

// A Follower keeps a limiter up to date with a Store.
type Follower struct {
	keepPolicies bool
	store        *Store
	logger       *slog.Logger

	cancel context.CancelFunc
	done   sync.WaitGroup

	ownPolicies []throttle.Policy // of the program
	state       State             // as it was read last; if Redis has forgotten the policies, with those it had
	version     int64             // the published version that is in force here; 0: its own policies
	reported    time.Time         // when it last said so
	offset      time.Duration     // of the clock of Redis
	silent      bool              // Redis did not answer last time
}

// Follow keeps the limiter of a Store up to date with it, from now until Close. It reads the Store
// once before it returns. While Redis does not answer, or nothing was published, the limiter has its
// own policies.
//
// Every change is in force within a second. The limiter's Observer.Followed is called for each version.
// Policies that cannot be used are logged, and those before stay in force, as they do if Redis forgets
// what was published.
func (s *Store) Follow(ctx context.Context, c FollowConfig) *Follower {
	l := s.limiter
	f := &Follower{keepPolicies: c.KeepPolicies, store: s, logger: l.Config().Logger, ownPolicies: l.Policies()}
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
	f.report(false)
}

// look reads the state, and puts what has changed in force.
func (f *Follower) look(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	before := f.state
	now, err := f.store.read(ctx, before)
	if ctx.Err() == context.Canceled {
		return
	}
	switch {
	case err != nil:
		if !f.silent {
			f.logger.Warn("control: what is in force cannot be read: what was read last stays", "err", err)
		}
		now = before.inForceAt(time.Now().Add(f.offset))
	case now.Version == 0 && before.Version > 0:
		if !f.keepPolicies {
			f.logger.Warn("control: Redis has forgotten the published policies: those before stay in force")
		}
		now.Policies, now.Removed, now.Version = before.Policies, before.Removed, before.Version
	}
	f.state, f.silent, f.offset = now, err != nil, time.Until(now.At)
	was, _ := before.Effective()
	policies, others := now.Effective()
	switch {
	case now.Version != before.Version:
		f.adopt()
	case f.version > 0 && !reflect.DeepEqual(was, policies):
		_ = f.apply()
	}
	if !reflect.DeepEqual(before.Overrides, now.Overrides) || !reflect.DeepEqual(before.Pauses, now.Pauses) {
		f.store.limiter.SetInterventions(others)
	}
	if time.Since(f.reported) >= reportEvery {
		f.report(true)
	}
}

// report notes for other processes which policies this one runs, or no longer.
func (f *Follower) report(follows bool) {
	if f.silent {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), readTimeout)
	defer cancel()
	runs := "its own policies " + digest(f.ownPolicies)
	if f.version > 0 {
		runs = fmt.Sprintf("published version %d", f.version)
	}
	key, member := f.store.key("processes"), runs+"\n"+f.store.limiter.Config().Name
	_, _ = f.store.client().Pipelined(ctx, func(pipe redis.Pipeliner) error { // the next report does it again
		if !follows {
			return pipe.ZRem(ctx, key, member).Err()
		}
		now := time.Now().Add(f.offset)
		pipe.ZAdd(ctx, key, redis.Z{Score: float64(now.Unix()), Member: member})
		pipe.ZRemRangeByScore(ctx, key, "0", fmt.Sprint(now.Add(-reportedFor).Unix()))
		return pipe.Expire(ctx, key, reportedFor).Err()
	})
	f.reported = time.Now()
}

// adopt puts newly published policies in force, and warns if they are not those of the program.
func (f *Follower) adopt() {
	differs := Differences(f.ownPolicies, f.state.Policies)
	if f.state.PoliciesErr == nil && len(f.ownPolicies) > 0 && differs != "" {
		f.logger.Warn("control: the policies of this program are not those that are published",
			"own", digest(f.ownPolicies), "published", f.state.Version, "keeps its own", f.keepPolicies, "differs", differs)
	}
	if f.keepPolicies {
		return
	}
	err := f.apply()
	if err == nil {
		f.report(false)
		f.version, f.reported = f.state.Version, time.Time{}
	}
	f.store.limiter.Config().Observer.Followed(throttle.Publication{Err: err, Version: f.state.Version})
}

// apply puts published policies in force, with what holds for all tenants.
func (f *Follower) apply() error {
	policies, _ := f.state.Effective()
	err := f.state.PoliciesErr
	if err == nil {
		err = f.store.limiter.SetPolicies(policies, f.state.Removed...)
	}
	if err != nil {
		f.logger.Error("control: published policies cannot be used: those before stay in force",
			"version", f.state.Version, "err", err)
	}
	return err
}
