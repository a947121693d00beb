package dispatch

const (
	BatchMax       = batchMax
	PendingFor     = pendingFor
	StoppedPause   = errorPause
	TakeTimeout    = takeTimeout
	UnavailableFor = unavailableFor
	WaitMax        = waitMax
)
