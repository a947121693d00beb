package sitetest

import (
	"context"
	"slices"
	"sync"

	"github.com/redis/go-redis/v9"
)

// A Fault makes some calls fail, or late.
type Fault struct {
	Is        func(args []any) bool
	Hits      func(n int) bool // by the number of such calls, from 1; nil hits all
	Lost      bool             // the call arrives, and its reply does not
	Meanwhile func()           // is called before the caller learns of it
	Err       error            // nil: the reply is late, and arrives

	mu    sync.Mutex
	calls int
	hit   int
}

// WithArg recognises calls with this argument.
func WithArg(value string) func([]any) bool {
	return func(args []any) bool { return slices.Contains(args, any(value)) }
}

// IsScript recognises calls of scripts.
func IsScript(args []any) bool { return args[0] == "evalsha" || args[0] == "eval" }

// IsRequeue recognises the requeue of a task that was denied: a restore with its message.
func IsRequeue(args []any) bool {
	const message = 15
	if len(args) <= message || args[2] != 6 || args[3] != "asynq:{default}:active" || args[6] != "asynq:{default}:pending" {
		return false
	}
	text, ok := args[message].([]byte)
	return ok && len(text) > 0
}

// Only hits the nth call.
func Only(n int) func(int) bool { return func(call int) bool { return call == n } }

// See is a hooktest.Hook.
func (f *Fault) See(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
	if !f.Is(cmd.Args()) {
		return next(ctx, cmd)
	}
	if f.Lost {
		if err := next(ctx, cmd); err != nil {
			return err // that Redis does not know the script yet
		}
	}
	f.mu.Lock()
	f.calls++
	hit := f.Hits == nil || f.Hits(f.calls)
	if hit {
		f.hit++
	}
	f.mu.Unlock()
	if hit {
		if f.Meanwhile != nil {
			f.Meanwhile()
		}
		if f.Err != nil {
			cmd.SetErr(f.Err)
			return f.Err
		}
	}
	if f.Lost {
		return nil
	}
	return next(ctx, cmd)
}

// Calls returns how many of the calls there were.
func (f *Fault) Calls() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls
}

// Count returns how many calls were hit.
func (f *Fault) Count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.hit
}

// IsForward recognises the move of tasks that are due.
func IsForward(args []any) bool {
	return len(args) > 13 && args[2] == 5 && args[4] == "asynq:{default}:retry" && args[13] == "due"
}

// IsPick recognises the arguments of a call that moves taken tasks to active.
func IsPick(args []any) bool {
	return len(args) > 6 && args[3] == "asynq:{default}:scheduled" && args[6] == "asynq:{default}:paused"
}
