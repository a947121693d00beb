package main

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle/throttletest"
)

func TestATopologyAnswersByItsURL(t *testing.T) {
	throttletest.Redis(t) // or skip the test where there is none
	for kind, connect := range map[string]func(hosts string) redis.UniversalClient{
		"redis-sentinel": func(hosts string) redis.UniversalClient {
			hosts, name, _ := strings.Cut(hosts, "?master=")
			return redis.NewFailoverClient(&redis.FailoverOptions{MasterName: name, SentinelAddrs: strings.Split(hosts, ",")})
		},
		"redis-cluster": func(hosts string) redis.UniversalClient {
			return redis.NewClusterClient(&redis.ClusterOptions{Addrs: strings.Split(hosts, ",")})
		},
	} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithCancel(t.Context())
			lines := make(writer, 100)
			ended := make(chan error)
			go func() { ended <- run(ctx, []string{strings.TrimPrefix(kind, "redis-")}, lines) }()
			select {
			case url := <-lines:
				scheme, hosts, _ := strings.Cut(strings.TrimSpace(url), "://")
				client := connect(hosts)
				defer client.Close()
				if err := client.Set(ctx, "key", "value", 0).Err(); scheme != kind || err != nil {
					t.Errorf("%s: %v", url, err)
				}
			case err := <-ended:
				t.Fatal(err)
			case <-time.After(time.Minute):
				t.Fatal("it has not started")
			}
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
	}
	if err := run(t.Context(), []string{"ring"}, nil); err == nil {
		t.Error("an unknown topology starts")
	}
}

// A writer sends each write.
type writer chan string

func (w writer) Write(p []byte) (int, error) {
	w <- string(p)
	return len(p), nil
}
