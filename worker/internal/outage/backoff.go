package outage

import "time"

// Pauses before what failed is asked again. They double.
const (
	pauseMin = 100 * time.Millisecond
	pauseMax = time.Second
)

// A Backoff delays the next attempt after a failure.
type Backoff struct {
	Failed bool
	Until  time.Time
	pause  time.Duration
}

// Fail notes one more failure.
func (b *Backoff) Fail(now time.Time) {
	b.Failed = true
	b.pause = min(max(2*b.pause, pauseMin), pauseMax)
	b.Until = now.Add(b.pause)
}
