// Package hooktest lets tests stand between a client and its Redis.
package hooktest

import (
	"context"

	"github.com/redis/go-redis/v9"
)

// A Hook is a redis.Hook that sees every command, and sends it, or not, by calling next. It does not see pipelines.
type Hook func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error

// DialHook changes nothing.
func (Hook) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessPipelineHook changes nothing.
func (Hook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// ProcessHook calls the hook.
func (h Hook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error { return h(ctx, cmd, next) }
}

// Twice sends every script call twice, and answers by the second reply: as if the first was lost.
func Twice(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
	if IsScript(cmd) {
		_ = next(ctx, cmd)
		cmd.SetErr(nil)
	}
	return next(ctx, cmd)
}

// IsScript reports whether the command calls a script.
func IsScript(cmd redis.Cmder) bool {
	name := cmd.Name()
	return name == "evalsha" || name == "eval"
}

// A Conn makes clients, as an asynq.RedisConnOpt does.
type Conn interface{ MakeRedisClient() any }

// With returns conn with the hook in every client that it makes.
func With(conn Conn, hook redis.Hook) Conn { return hookedConn{conn, hook} }

type hookedConn struct {
	Conn
	hook redis.Hook
}

func (w hookedConn) MakeRedisClient() any {
	made := w.Conn.MakeRedisClient()
	made.(redis.UniversalClient).AddHook(w.hook)
	return made
}
