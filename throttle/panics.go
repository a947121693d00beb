package throttle

import (
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"
)

// panicsEvery is the shortest time between two logged panics of one function.
const panicsEvery = time.Minute

// panics logs the panics of a Config's functions, with their stacks.
type panics struct {
	logger *slog.Logger

	mu     sync.Mutex
	logged map[string]time.Time // by function
}

func (p *panics) log(function string, value any) {
	p.mu.Lock()
	now := time.Now()
	last, known := p.logged[function]
	due := !known || now.Sub(last) >= panicsEvery
	if due {
		p.logged[function] = now
	}
	p.mu.Unlock()
	if due {
		p.logger.Error("throttle: a function of the limiter's Config panicked",
			"function", function, "panic", fmt.Sprint(value), "stack", string(debug.Stack()))
	}
}

// guarded returns an observer that has all functions, which return after a panic.
func (o Observer) guarded(p *panics) Observer {
	return Observer{
		Called:      guarded1(p, "Called", o.Called),
		Corrected:   guarded1(p, "Corrected", o.Corrected),
		Decided:     guarded1(p, "Decided", o.Decided),
		Followed:    guarded2(p, "Followed", o.Followed),
		Joined:      guarded3(p, "Joined", o.Joined),
		Refused:     guarded1(p, "Refused", o.Refused),
		Started:     guarded1(p, "Started", o.Started),
		Taken:       guarded2(p, "Taken", o.Taken),
		Unavailable: guarded3(p, "Unavailable", o.Unavailable),
	}
}

func guarded1[A any](p *panics, name string, f func(A)) func(A) {
	if f == nil {
		return func(A) {}
	}
	return func(a A) { defer p.recovered(name); f(a) }
}

func guarded2[A, B any](p *panics, name string, f func(A, B)) func(A, B) {
	if f == nil {
		return func(A, B) {}
	}
	return func(a A, b B) { defer p.recovered(name); f(a, b) }
}

func guarded3[A, B, C any](p *panics, name string, f func(A, B, C)) func(A, B, C) {
	if f == nil {
		return func(A, B, C) {}
	}
	return func(a A, b B, c C) { defer p.recovered(name); f(a, b, c) }
}

// recovered is deferred around an Observer's function.
func (p *panics) recovered(name string) {
	if value := recover(); value != nil {
		p.log("Observer."+name, value)
	}
}
