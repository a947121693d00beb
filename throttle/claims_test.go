package throttle

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

// A result is delivered while the claim reads the one before. That never blocks: it would stop all
// claims of the process.
func TestDeliveringToAClaimNeverBlocks(t *testing.T) {
	one := &waiter{result: make(chan result, 1)}
	var delivered atomic.Bool
	go func() {
		for range 200_000 {
			one.deliver(result{})
		}
		delivered.Store(true)
	}()
	for end := time.Now().Add(time.Minute); !delivered.Load(); {
		select {
		case <-one.result:
		default:
			expect.Require(t, !time.Now().After(end), "it blocks")
		}
	}
}
