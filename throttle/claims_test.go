package throttle

import (
	"sync/atomic"
	"testing"
	"time"
)

// A claim is told what became of it while it reads what it was told before. That never blocks: it
// would stop all claims of the process.
func TestTellingAClaimNeverBlocks(t *testing.T) {
	one := &claim{got: make(chan outcome, 1)}
	c := &claims{}
	var told atomic.Bool
	go func() {
		for range 2_000_000 {
			c.tell(one, outcome{})
		}
		told.Store(true)
	}()
	for end := time.Now().Add(20 * time.Second); !told.Load(); {
		select {
		case <-one.got:
		default:
			if time.Now().After(end) {
				t.Fatal("it blocks")
			}
		}
	}
}
