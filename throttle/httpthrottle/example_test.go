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

func ExampleNewMiddleware() {
	limiter, end := exampleLimiter(throttle.Policy{
		Name: "site",
		Windows: []throttle.Window{
			{Name: "address", Limit: 100, Period: time.Minute, Scope: throttle.Per("ip")},
			{Name: "user", Limit: 1, Period: time.Minute, Scope: throttle.Per("user")},
		},
	})
	defer end()

	limit, err := httpthrottle.NewMiddleware(httpthrottle.MiddlewareConfig{
		Limiter:    limiter,
		Policy:     "site",
		Attributes: func(r *http.Request) map[string]string { return map[string]string{"user": r.Header.Get("X-User")} },
	})
	if err != nil {
		log.Fatal(err)
	}
	site := limit(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") }))
	for _, user := range []string{"ann", "ann", "bob"} {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header.Set("X-User", user)
		w := httptest.NewRecorder()
		site.ServeHTTP(w, r)
		fmt.Println(user, w.Code, w.Header().Get("RateLimit-Policy"))
	}
	// Output:
	// ann 200 "address";q=100;w=60, "user";q=1;w=60
	// ann 429 "address";q=100;w=60, "user";q=1;w=60
	// bob 200 "address";q=100;w=60, "user";q=1;w=60
}
