package limitertest

import (
	"flag"

	_ "pgregory.net/rapid" // it defines the flag
)

// Random histories are slow with the race detector. So a run has 15 of each, unless -rapid.checks
// says otherwise.
func init() { flag.Set("rapid.checks", "15") }
