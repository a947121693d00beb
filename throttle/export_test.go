package throttle

// SetNow hands the scripts a time in microseconds instead of the clock of Redis.
func (l *Limiter) SetNow(now func() int64) { l.now = now }
