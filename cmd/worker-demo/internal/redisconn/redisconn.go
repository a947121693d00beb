// Package redisconn connects to a Redis, or starts one inside the process.
package redisconn

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
)

// A Server is where the queue and the windows are.
type Server struct {
	Client redis.UniversalClient
	Opt    asynq.RedisConnOpt

	embedded *miniredis.Miniredis
}

// Open connects to the server of the URL, or starts an embedded one for this process.
func Open(ctx context.Context, uri string) (*Server, error) {
	s, name := &Server{}, "embedded Redis"
	if uri == "" {
		s.embedded = miniredis.NewMiniRedis()
		s.embedded.ClockTTL(true)
		if err := s.embedded.Start(); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		s.Opt = asynq.RedisClientOpt{Addr: s.embedded.Addr()}
	} else {
		u, err := url.Parse(uri)
		if err != nil {
			return nil, errors.New("--redis: is not a URL: must be such as redis://localhost:6379/0") // the error holds the password
		}
		name = "--redis " + u.Redacted()
		if s.Opt, err = asynq.ParseRedisURI(uri); err != nil {
			return nil, fmt.Errorf("%s: %w: must be such as redis://localhost:6379/0", name, err)
		}
	}
	s.Client = s.Opt.MakeRedisClient().(redis.UniversalClient)
	ping, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if err := s.Client.Ping(ping).Err(); err != nil {
		s.Close()
		return nil, fmt.Errorf("%s: %w: must be a Redis that answers", name, err)
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
