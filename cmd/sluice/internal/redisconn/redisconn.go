// Package redisconn connects to a Redis, or starts one inside the process.
package redisconn

import (
	"context"
	"fmt"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
)

// A Server is where the queue and the windows are.
type Server struct {
	Client redis.UniversalClient
	Opt    Opt

	embedded *miniredis.Miniredis
}

// An Opt makes clients. It is an asynq.RedisConnOpt: asynq's own knows no user names.
type Opt struct{ connect func() redis.UniversalClient }

// MakeRedisClient returns a new client, a redis.UniversalClient.
func (o Opt) MakeRedisClient() any { return o.connect() }

// Embedded starts a Redis that lives in this process, and ends at Close.
func Embedded() (*Server, error) {
	s := &Server{embedded: miniredis.NewMiniRedis()}
	s.embedded.ClockTTL(true)
	if err := s.embedded.Start(); err != nil {
		return nil, fmt.Errorf("embedded Redis: %w", err)
	}
	addr := s.embedded.Addr()
	s.Opt.connect = func() redis.UniversalClient { return redis.NewClient(&redis.Options{Addr: addr}) }
	s.Client = s.Opt.connect()
	return s, nil
}

// Open connects to a Redis and sees that it answers, within 10 s. go-redis needs 3 s to report what
// keeps it from connecting, such as a certificate. Errors name the source of its URL, and never show a
// password.
func Open(ctx context.Context, source string, opt Opt) (*Server, error) {
	s := &Server{Opt: opt, Client: opt.connect()}
	ping, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := s.Client.Ping(ping).Err(); err != nil {
		s.Close()
		return nil, fmt.Errorf("%s: %w: must be a Redis that answers", source, err)
	}
	return s, nil
}

// Close closes the connection, and ends the server if it is ours.
func (s *Server) Close() {
	s.Client.Close()
	if s.embedded != nil {
		s.embedded.Close()
	}
}
