package apitest

import "time"

// The bars of "Adaptive limits" in docs/reference/performance.md.
const (
	MostRefused       = 0.03             // of calls
	LeastUsed         = 0.85             // of the published limit, while a backlog waits
	FullRate          = 0.95             // of the full rate counts as the full rate
	MostUntilFull     = 30 * time.Second // after a limit is restored
	MostRefusedBeside = 0.05             // of calls, while a stranger uses the same key
	LeastUsedBeside   = 0.9              // of what the stranger leaves
)
