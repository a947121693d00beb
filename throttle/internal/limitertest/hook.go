package limitertest

import (
	"context"
	"strings"

	"github.com/redis/go-redis/v9"
)

// A Hook is a redis.Hook that sees every command of a client. It sends the command by calling next.
type Hook func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error

// DialHook changes nothing.
func (Hook) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessPipelineHook changes nothing: scripts are not sent in pipelines.
func (Hook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// ProcessHook calls the hook.
func (h Hook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error { return h(ctx, cmd, next) }
}

// IsScript reports whether a command runs a script.
func IsScript(cmd redis.Cmder) bool { return strings.HasPrefix(strings.ToLower(cmd.Name()), "eval") }
