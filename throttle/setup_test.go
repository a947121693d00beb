package throttle_test

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
)

type (
	clock = limitertest.Clock
	tb    = limitertest.TB
)

var (
	acme         = limitertest.Acme
	at           = limitertest.At
	cancel       = limitertest.Cancel
	day          = limitertest.Day
	dump         = limitertest.Dump
	made         = limitertest.Made
	newBy        = limitertest.NewBy
	newEdited    = limitertest.NewEdited
	newHanded    = limitertest.NewHanded
	newLimiter   = limitertest.New
	newMidnight  = limitertest.NewClock
	newProxy     = limitertest.NewProxy
	peek         = limitertest.Peek
	policy       = limitertest.Policy
	quota        = limitertest.Quota
	release      = limitertest.Release
	reserve      = limitertest.Reserve
	setPolicy    = limitertest.SetPolicy
	sharedWindow = limitertest.SharedWindow
	slots        = limitertest.Slots
	ticketOf     = limitertest.Ticket
	used         = limitertest.Used
)
