package httpthrottle_test

import (
	"errors"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/httpthrottle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func ExampleTransport() {
	limiter, err := throttle.New(throttle.Config{Client: throttletest.Embedded(), Policies: []throttle.Policy{{
		Name:    "github-api",
		Windows: []throttle.Window{{Name: "per-hour", Limit: 2, Period: time.Hour}},
	}}})
	if err != nil {
		log.Fatal(err)
	}
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
