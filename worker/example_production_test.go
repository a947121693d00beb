package worker_test

import (
	"crypto/tls"
	"log"
	"log/slog"
	"os"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// A worker for production: docs/howto/production.md. It is compiled, and not run.
func Example_production() {
	var mux *asynq.ServeMux
	var policies []throttle.Policy
	logger := slog.Default()

	connection := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: "redis.example.com"}
	redisOpt := asynq.RedisClientOpt{
		Addr: "redis.example.com:6380", Username: "sluice-worker", Password: os.Getenv("REDIS_PASSWORD"), TLSConfig: connection,
	}
	limiter, err := throttle.New(throttle.Config{
		Client: redis.NewClient(&redis.Options{
			Addr: redisOpt.Addr, Username: redisOpt.Username, Password: redisOpt.Password, TLSConfig: connection,
		}),
		Name:     os.Getenv("POD_NAME"), // how a pause says who reported the refusal
		Policies: policies,
		Prefix:   "production:",
	})
	if err != nil {
		log.Fatal(err)
	}
	server, err := worker.NewServer(redisOpt, asynq.Config{
		Concurrency:     50,
		ShutdownTimeout: 25 * time.Second, // less than the platform waits before it kills
	}, worker.Config{Limiter: limiter, Logger: logger, RejectUnmatched: true})
	if err != nil {
		log.Fatal(err)
	}
	if err := server.Run(mux); err != nil {
		log.Fatal(err)
	}
}
