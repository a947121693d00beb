package limitertest

import "time"

const (
	us = time.Microsecond
	ms = time.Millisecond
	s  = time.Second
	m  = time.Minute
	h  = time.Hour
)
