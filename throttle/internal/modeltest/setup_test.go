package modeltest

import (
	"time"

	"github.com/sluice-go/sluice/throttle/internal/limitertest"
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
	onRedis      = limitertest.OnRedis
	peek         = limitertest.Peek
	policy       = limitertest.Policy
	readLine     = limitertest.ReadLine
	reserve      = limitertest.Reserve
	setPolicy    = limitertest.SetPolicy
	sharedWindow = limitertest.SharedWindow
	take         = limitertest.Take
)
