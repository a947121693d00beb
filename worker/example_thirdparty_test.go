package worker_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/httpthrottle"
	"github.com/sluice-go/sluice/worker"
)

// How to call a third-party API: docs/howto/third-party-apis.md.
func Example_thirdPartyAPI() {
	m, err := miniredis.Run() // an embedded Redis, for the example
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()
	redisOpt := asynq.RedisClientOpt{Addr: m.Addr()}
	api := httptest.NewServer(&languageModel{})
	defer api.Close()

	limiter, err := throttle.New(throttle.Config{
		Client: redis.NewClient(&redis.Options{Addr: m.Addr()}),
		Policies: []throttle.Policy{{
			Name:  "llm",
			Match: []string{"llm:*"},
			Windows: []throttle.Window{
				{Name: "requests", Limit: 500, Period: time.Minute, Shared: true},
				{Name: "tokens", Limit: 10_000, Period: time.Minute, Unit: "tokens", Shared: true},
				{Name: "at-once", Limit: 8, Algorithm: throttle.AlgorithmConcurrency, Shared: true},
			},
		}},
	})
	if err != nil {
		log.Fatal(err)
	}

	transport, err := httpthrottle.NewTransport(httpthrottle.TransportConfig{
		Limiter:   limiter,
		Policy:    "llm",
		LearnOnly: true, // the task has reserved already
	})
	if err != nil {
		log.Fatal(err)
	}
	calls := &http.Client{Transport: transport}

	done := make(chan struct{})
	summarize := func(ctx context.Context, task *asynq.Task) error {
		job := worker.FromContext(ctx)
		request, err := http.NewRequestWithContext(ctx, http.MethodPost, api.URL, strings.NewReader(string(task.Payload())))
		if err != nil {
			return err
		}
		resp, err := calls.Do(request)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			fmt.Println("refused, Retry-After:", resp.Header.Get("Retry-After"))
			if err := job.Cancel(ctx); err != nil { // the API charges nothing for a refusal
				return err
			}
			return fmt.Errorf("the model answered %s", resp.Status) // after a refusal it costs no retry
		}
		var answer struct{ Tokens int64 }
		if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
			return err
		}
		if err := job.Settle(ctx, "tokens", answer.Tokens); err != nil { // the estimate was too high
			return err
		}
		retried, _ := asynq.GetRetryCount(ctx)
		fmt.Printf("answered with %d tokens, %d retries used\n", answer.Tokens, retried)
		close(done)
		return nil
	}

	server, err := worker.NewServer(
		redisOpt,
		asynq.Config{Concurrency: 10, LogLevel: asynq.ErrorLevel},
		worker.Config{Limiter: limiter},
	)
	if err != nil {
		log.Fatal(err)
	}
	defer server.Shutdown()
	mux := asynq.NewServeMux()
	mux.HandleFunc("llm:summarize", summarize)
	if err := server.Start(mux); err != nil {
		log.Fatal(err)
	}

	client, err := worker.NewClient(redisOpt, worker.ClientConfig{Limiter: limiter})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	task := worker.NewTask(worker.Identity{
		Tenant: "acme",
		Cost:   map[string]int64{"tokens": 1500}, // an estimate; 1 of requests besides
	}, "llm:summarize", []byte("a long text"))
	if _, err := client.EnqueueContext(context.Background(), task); err != nil {
		log.Fatal(err)
	}
	<-done

	d, err := limiter.Peek(context.Background(), throttle.Request{Policy: "llm", Tenant: "acme"})
	if err != nil {
		log.Fatal(err)
	}
	for _, w := range d.Windows {
		if w.Name == "tokens" {
			fmt.Println("tokens counted:", w.Used)
		}
	}
	// Output:
	// refused, Retry-After: 1
	// answered with 900 tokens, 0 retries used
	// tokens counted: 900
}

// A languageModel refuses the first call, and answers the others.
type languageModel struct{ asked bool }

func (m *languageModel) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	if !m.asked {
		m.asked = true
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusTooManyRequests)
		return
	}
	fmt.Fprint(w, `{"tokens": 900}`)
}
