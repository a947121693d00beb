package dispatch

const (
	TakeMax         = takeMax
	TasksPerPending = tasksPerPending
	RetryAfterError = retryAfterError
	TakeTimeout     = takeTimeout
	UnavailableFor  = unavailableFor
	WaitMax         = waitMax
)
