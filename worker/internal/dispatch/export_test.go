package dispatch

const (
	BatchMax       = batchMax
	EmptyEvery     = emptyEvery
	PendingFor     = pendingFor
	StoppedPause   = stoppedPause
	StuckMax       = stuckMax
	StuckPause     = stuckPause
	TakeTimeout    = takeTimeout
	UnavailableFor = unavailableFor
	WaitMax        = waitMax
)
