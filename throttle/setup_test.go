package throttle_test

import "time"

const (
	us = time.Microsecond
	ms = time.Millisecond
	s  = time.Second
	m  = time.Minute
	h  = time.Hour
)
