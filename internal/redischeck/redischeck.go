// Package redischeck finds how a Redis is not set up for Sluice.
package redischeck

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// clockOffMax is how far the clocks of Redis and of this machine may differ without a finding.
const clockOffMax = time.Second

// Findings returns what is not set up, one line each: see throttle.Limiter.CheckRedis. The error is
// that of go-redis, if there is no answer, or a refusal of the user.
func Findings(ctx context.Context, client redis.UniversalClient) ([]string, error) {
	var mu sync.Mutex
	var findings []string
	_, cluster := client.(*redis.ClusterClient)
	check := func(ctx context.Context, client redis.UniversalClient, addr string) error {
		found, err := checkServer(ctx, client, addr, cluster)
		mu.Lock()
		defer mu.Unlock()
		findings = append(findings, found...)
		return err
	}
	var err error
	switch c := client.(type) {
	case *redis.ClusterClient:
		err = c.ForEachMaster(ctx, func(ctx context.Context, node *redis.Client) error {
			return check(ctx, node, node.Options().Addr)
		})
	case *redis.Client:
		err = check(ctx, c, c.Options().Addr)
	default:
		err = check(ctx, c, "")
	}
	slices.Sort(findings)
	return findings, err
}

// checkServer looks at one server, which may be part of the Cluster of a client. The error is not an
// answer of Redis.
func checkServer(
	ctx context.Context, client redis.UniversalClient, addr string, cluster bool,
) (findings []string, err error) {
	find := func(format string, a ...any) {
		findings = append(findings, strings.TrimSpace("redis "+addr)+": "+fmt.Sprintf(format, a...))
	}
	begun := time.Now()
	at, err := client.Time(ctx).Result()
	stranger := err != nil && Forbidden(err) && !strings.HasPrefix(err.Error(), "NOPERM")
	if unanswered(err) || stranger { // Redis refuses whatever a user asks that it does not know
		return nil, err
	}
	off, way := time.Until(at), "ahead of" // the clock was read since it begun
	if behind := begun.Sub(at); behind > off {
		off, way = behind, "behind"
	}
	if err == nil && off > clockOffMax {
		find("its clock is %v %s this machine's: must be within %v, or deadlines and expected starts are off by that",
			off.Round(time.Millisecond), way, clockOffMax)
	}
	text, err := client.Info(ctx).Result()
	switch {
	case unanswered(err):
		return findings, err
	case err != nil:
		return findings, nil
	}
	info := map[string]string{}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			info[name] = value
		}
	}
	var major, minor int
	version := info["redis_version"]
	n, _ := fmt.Sscanf(version, "%d.%d", &major, &minor)
	if n == 2 && (major < 6 || major == 6 && minor < 2) {
		find("it is Redis %s: must be 6.2 or newer", version)
	}
	if policy := info["maxmemory_policy"]; policy != "" && policy != "noeviction" {
		find("maxmemory-policy is %s: must be noeviction, or windows and waiting tasks are forgotten", policy)
	}
	if info["role"] == "slave" {
		find("it is a replica: must be the primary, as every call writes")
	}
	if _, single := client.(*redis.Client); single && info["cluster_enabled"] == "1" && !cluster {
		find("it is a node of a Cluster: the client must be that of a Cluster, such as redis.NewClusterClient")
	}
	return findings, nil
}

// unanswered reports whether an error is none of Redis' own.
func unanswered(err error) bool {
	var answer redis.Error
	return err != nil && !errors.As(err, &answer)
}

// Forbidden reports whether an error says that Redis does not know the user, or does not let it
// call something.
func Forbidden(err error) bool {
	var reply redis.Error
	return errors.As(err, &reply) && Refuses(reply.Error())
}

// Refuses reports whether the text of an error says so.
func Refuses(text string) bool {
	for _, code := range []string{"NOAUTH", "NOPERM", "WRONGPASS"} {
		if strings.HasPrefix(text, code+" ") {
			return true
		}
	}
	// Inside of a script, by release.
	return strings.Contains(text, "ACL failure in script") ||
		strings.Contains(text, "The user executing the script can't ")
}
