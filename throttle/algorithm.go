package throttle

import (
	"maps"
	"slices"

	"github.com/sluice-go/sluice/throttle/internal/algorithm"
)

// An Algorithm says how a window counts units.
type Algorithm string

const (
	// AlgorithmSliding, the default, counts the last period: no span of that length has more than Limit.
	AlgorithmSliding Algorithm = "sliding"

	// AlgorithmFixed counts buckets of one period each, which begin at whole multiples of it since 1970, in UTC.
	AlgorithmFixed Algorithm = "fixed"

	// AlgorithmGCRA grants Burst units at once, then one each Period/Limit: generic cell rate (ITU-T I.371).
	AlgorithmGCRA Algorithm = "gcra"

	// AlgorithmCalendar counts between two ticks of a cron expression, such as midnights: see Window.Resets.
	AlgorithmCalendar Algorithm = "calendar"

	// AlgorithmConcurrency counts what runs at once. Units are held until Reservation.Release, or for
	// Lease after the last renewal: see Reservation.Hold.
	AlgorithmConcurrency Algorithm = "concurrency"
)

// Leases reports whether windows hold units until they are given back, or their lease runs out.
func (a Algorithm) Leases() bool { return a.side() != nil && a.side().Leases }

// side returns the Go side of an algorithm, or nil if there is none of that name.
func (a Algorithm) side() *algorithm.Algorithm { return algorithm.ByName[string(a)] }

// algorithmNames lists the algorithms that have the option, or with "" all, in order.
func algorithmNames(o algorithm.Option) (names []string) {
	for _, name := range slices.Sorted(maps.Keys(algorithm.ByName)) {
		if o == "" || algorithm.ByName[name].Has(o) {
			names = append(names, name)
		}
	}
	return names
}
