package httpthrottle_test

import (
	"errors"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/httpthrottle"
)

// exampleLimiter is a limiter on an embedded Redis; any Redis will do.
func exampleLimiter(p throttle.Policy) (l *throttle.Limiter, end func()) {
	server, err := miniredis.Run()
	if err != nil {
		log.Fatal(err)
	}
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	l, err = throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{p}})
	if err != nil {
		log.Fatal(err)
	}
	return l, func() { client.Close(); server.Close() }
}

func ExampleTransport() {
	limiter, end := exampleLimiter(throttle.Policy{
		Name:    "github-api",
		Windows: []throttle.Window{{Name: "per-hour", Limit: 2, Period: time.Hour}},
	})
	defer end()
	api := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer api.Close()

	transport, err := httpthrottle.NewTransport(httpthrottle.TransportConfig{
		Limiter: limiter,
		Policy:  "github-api",
		Request: func(*http.Request) (throttle.Request, bool) { // without it: the context's throttle.Caller
			return throttle.Request{Tenant: "acme"}, true
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	client := &http.Client{Transport: transport}
	for range 3 {
		resp, err := client.Get(api.URL)
		var denied *throttle.DeniedError
		switch {
		case errors.As(err, &denied):
			fmt.Println("denied for", denied.Decision.RetryIn.Round(time.Hour))
		case err != nil:
			log.Fatal(err)
		default:
			resp.Body.Close()
			fmt.Println(resp.Status)
		}
	}
	// Output:
	// 200 OK
	// 200 OK
	// denied for 1h0m0s
}
