package linetest

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
	grant = limitertest.Grant
	tb    = limitertest.TB
)

var (
	acme         = limitertest.Acme
	agrees       = limitertest.Agrees
	at           = limitertest.At
	cancel       = limitertest.Cancel
	costOf       = limitertest.CostOf
	day          = limitertest.Day
	dump         = limitertest.Dump
	isGone       = limitertest.IsGone
	made         = limitertest.Made
	mostOver     = limitertest.MostOver
	newBy        = limitertest.NewBy
	newEdited    = limitertest.NewEdited
	newHanded    = limitertest.NewHanded
	newLimiter   = limitertest.New
	newMidnight  = limitertest.NewClock
	newProxy     = limitertest.NewProxy
	onRedis      = limitertest.OnRedis
	peek         = limitertest.Peek
	policy       = limitertest.Policy
	quota        = limitertest.Quota
	readLine     = limitertest.ReadLine
	release      = limitertest.Release
	reserve      = limitertest.Reserve
	settle       = limitertest.Settle
	setPolicy    = limitertest.SetPolicy
	sharedWindow = limitertest.SharedWindow
	slots        = limitertest.Slots
	take         = limitertest.Take
	ticketOf     = limitertest.Ticket
	used         = limitertest.Used
)
