package dispatch

const (
	TakeMax         = takeMax
	PendingFor      = pendingFor
	RetryAfterError = retryAfterError
	TakeTimeout     = takeTimeout
	UnavailableFor  = unavailableFor
	WaitMax         = waitMax
)
