package page_test

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/page"
)

// How to mount the page: docs/howto/operate.md.
func Example() {
	m, err := miniredis.Run()
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()
	redisOpt := asynq.RedisClientOpt{Addr: m.Addr()}
	limits := redis.NewClient(&redis.Options{Addr: m.Addr()})
	defer limits.Close()
	limiter, err := throttle.New(throttle.Config{
		Client:   limits,
		Policies: []throttle.Policy{{Name: "github-api", Windows: []throttle.Window{{Name: "w", Limit: 20, Period: time.Minute}}}},
	})
	if err != nil {
		log.Fatal(err)
	}
	client, err := worker.NewClient(redisOpt, worker.ClientConfig{Limiter: limiter})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	inspector := asynq.NewInspector(redisOpt)
	defer inspector.Close()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()

	store := control.StoreOf(limiter)
	sluice, err := page.New(page.Config{
		Asynqmon: "/asynqmon", Client: client, Inspector: inspector, Limiter: limiter,
		Control: store, Token: os.Getenv("SLUICE_PAGE_TOKEN"), // for who may change something
	})
	if err != nil {
		log.Fatal(err)
	}
	go sluice.Run(ctx) // records how many wait
	mux := http.NewServeMux()
	mux.Handle("/sluice/", http.StripPrefix("/sluice", sluice))

	server := httptest.NewServer(mux)
	defer server.Close()
	resp, err := http.Get(server.URL + "/sluice/")
	if err != nil {
		log.Fatal(err)
	}
	resp.Body.Close()
	fmt.Println(resp.Status)
	// Output: 200 OK
}
