// Package redisconn connects to a Redis, or starts one inside the process.
package redisconn

import (
	"context"
	"fmt"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
)

// A Server is a connection to the Redis of a limiter, and of its workers.
type Server struct {
	Client redis.UniversalClient
	Opt    Opt

	embedded *miniredis.Miniredis // nil if the server runs elsewhere
}

// An Opt makes clients. It is an asynq.RedisConnOpt; asynq.ParseRedisURI would drop the name of the user.
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

// Open connects to a Redis and makes sure that it answers. It waits up to 10 s, as go-redis needs 3 s to report why it
// cannot connect, such as for a certificate. Errors name the source of the URL, and never show a password.
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

// Close closes the connection, and ends an embedded server.
func (s *Server) Close() {
	s.Client.Close()
	if s.embedded != nil {
		s.embedded.Close()
	}
}
