package dispatch

const (
	BatchMax       = batchMax
	PendingFor     = pendingFor
	StoppedPause   = stoppedPause
	StuckMax       = stuckMax
	StuckPause     = stuckPause
	TakeTimeout    = takeTimeout
	UnavailableFor = unavailableFor
	WaitMax        = waitMax
)
