package throttle

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

// A ticket is delivered while the call reads what came before. That never blocks: it would stop all
// claims of the process.
func TestDeliveringToAClaimNeverBlocks(t *testing.T) {
	one := &waiter{taken: make(chan *TakenTicket, 1)}
	var delivered atomic.Bool
	go func() {
		for range 200_000 {
			one.deliver(nil)
		}
		delivered.Store(true)
	}()
	for end := time.Now().Add(time.Minute); !delivered.Load(); {
		select {
		case <-one.taken:
		default:
			expect.Require(t, !time.Now().After(end), "it blocks")
		}
	}
}
