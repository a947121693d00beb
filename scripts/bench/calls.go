package main

import (
	"context"
	"slices"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// A scriptCall is one call of a script by a limiter.
type scriptCall struct {
	sha            string
	sent, answered time.Time
	reply          int // values in the reply, if it is a list
}

// A callLog is a redis.Hook that notes when a client calls scripts.
type callLog struct {
	mu    sync.Mutex
	calls []scriptCall
}

// callsOf returns the calls of one script, or of all scripts for "", in the order of sending.
func (l *callLog) callsOf(sha string) []scriptCall {
	l.mu.Lock()
	defer l.mu.Unlock()
	calls := slices.DeleteFunc(slices.Clone(l.calls), func(c scriptCall) bool { return sha != "" && c.sha != sha })
	slices.SortFunc(calls, func(a, b scriptCall) int { return a.sent.Compare(b.sent) })
	return calls
}

// sentFor returns when the call was sent that granted at a time by the clock of Redis, which is
// this machine's. It is the newest call under way then. Without one it returns the time itself.
func sentFor(calls []scriptCall, granted time.Time) time.Time {
	next := sort.Search(len(calls), func(i int) bool { return calls[i].sent.After(granted) })
	for i := next - 1; i >= max(0, next-64); i-- {
		if !calls[i].answered.Before(granted) {
			return calls[i].sent
		}
	}
	return granted
}

func (l *callLog) note(cmd redis.Cmder, sent time.Time) {
	if !strings.HasPrefix(cmd.Name(), "eval") || len(cmd.Args()) < 2 {
		return
	}
	c := scriptCall{sent: sent, answered: time.Now()}
	c.sha, _ = cmd.Args()[1].(string)
	if reply, ok := cmd.(*redis.Cmd); ok {
		values, _ := reply.Val().([]any)
		c.reply = len(values)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls = append(l.calls, c)
}

func (l *callLog) DialHook(next redis.DialHook) redis.DialHook { return next }

func (l *callLog) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		sent := time.Now()
		err := next(ctx, cmd)
		l.note(cmd, sent)
		return err
	}
}

func (l *callLog) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		sent := time.Now()
		err := next(ctx, cmds)
		for _, cmd := range cmds {
			l.note(cmd, sent)
		}
		return err
	}
}
