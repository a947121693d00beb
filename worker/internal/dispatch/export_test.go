package dispatch

const (
	BatchMax       = batchMax
	PendingFor     = pendingFor
	StoppedPause   = stoppedPause
	TakeTimeout    = takeTimeout
	UnavailableFor = unavailableFor
	WaitMax        = waitMax
)
