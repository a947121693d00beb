package sitetest

import (
	"sync/atomic"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
)

// SetClock keeps the clock of a miniredis ahead of this machine's, until its result is called.
func SetClock(m *miniredis.Miniredis, ahead *atomic.Int64) (end func()) {
	ended := make(chan struct{})
	go func() {
		for {
			m.SetTime(time.Now().Add(time.Duration(ahead.Load())))
			select {
			case <-time.After(20 * time.Millisecond):
			case <-ended:
				return
			}
		}
	}()
	synctest.Wait()
	return func() { close(ended) }
}
