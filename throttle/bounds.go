package throttle

import (
	"time"

	"github.com/sluice-go/sluice/throttle/internal/algorithm"
)

// Bounds, all inclusive, and defaults.
const (
	MinPeriod      = time.Millisecond
	MaxPeriod      = algorithm.MaxPeriod      // 366 days; also of pauses
	MaxLimit       = algorithm.MaxLimit       // 10^12
	MinLease       = algorithm.MinLease       // 1 s
	MaxLease       = algorithm.MaxLease       // 24 h
	MaxConcurrency = algorithm.MaxConcurrency // 10,000: the limit of a Concurrency window
	MaxWindows     = 32                       // of a policy
	MaxAttributes  = 8                        // of a scope
	MaxShards      = 64
	MinBatchShare  = 0.001
	MaxBatchShare  = 0.5
	MaxGlobBytes   = 1024 // of a glob in Policy.Match
	MaxValueBytes  = 512  // of a tenant's name or any other attribute's value
	MaxKeyBytes    = 64   // of Request.Key
	MaxCauseBytes  = 128  // of the cause of a pause
	MaxNameBytes   = 128  // of Config.Name
	MaxTake        = 64   // tickets of one Line.Take

	DefaultBatchShare = 0.05
	DefaultLease      = algorithm.DefaultLease // 30 s
	DefaultMaxPause   = time.Hour
	DefaultPause      = time.Second // of a policy that does not adapt, if the upstream does not say
)
