package limitertest

import (
	"flag"

	_ "pgregory.net/rapid" // it defines the flag
)

// Random histories are slow with the race detector. So a run has 15 of each, the same ones every
// time. To look for new ones: -rapid.checks=1000 -rapid.seed=0.
func init() {
	flag.Set("rapid.checks", "15")
	flag.Set("rapid.seed", "1")
}
