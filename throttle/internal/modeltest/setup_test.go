package modeltest

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

const (
	us = time.Microsecond
	ms = time.Millisecond
	s  = time.Second
	m  = time.Minute
	h  = time.Hour

	midnight = limitertest.Midnight
	lineZero = limitertest.LineZero
)

type (
	clock = limitertest.Clock
	grant = limitertest.Grant
)

var (
	settle       = limitertest.Settle
	acme         = limitertest.Acme
	cancel       = limitertest.Cancel
	costOf       = limitertest.CostOf
	dump         = limitertest.Dump
	isGone       = limitertest.IsGone
	mostOver     = limitertest.MostOver
	newBy        = limitertest.NewBy
	newEdited    = limitertest.NewEdited
	newHanded    = limitertest.NewHanded
	newLimiter   = limitertest.New
	newMidnight  = limitertest.NewClock
	peek         = limitertest.Peek
	policy       = limitertest.Policy
	readLine     = limitertest.ReadLine
	reserve      = limitertest.Reserve
	setPolicy    = limitertest.SetPolicy
	sharedWindow = limitertest.SharedWindow
	take         = limitertest.Take
)

// onRedis runs the longer tests on a real Redis only: miniredis takes ten times as long for a script.
func onRedis(t *testing.T, test func(t *testing.T, client *redis.Client)) {
	t.Helper()
	t.Parallel()
	test(t, throttletest.Client(t, throttletest.Redis(t)))
}
