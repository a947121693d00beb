// Package redischeck finds how a Redis is not set up for Sluice.
package redischeck

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// Findings returns what is not set up, one line each: see throttle.Limiter.CheckRedis. The error is
// that of go-redis, if there is no answer, or the user is unknown.
func Findings(ctx context.Context, client redis.UniversalClient) ([]string, error) {
	cluster, ok := client.(*redis.ClusterClient)
	if !ok {
		return server(ctx, client)
	}
	var mu sync.Mutex
	var all []string
	err := cluster.ForEachMaster(ctx, func(ctx context.Context, node *redis.Client) error {
		found, err := server(ctx, node)
		mu.Lock()
		defer mu.Unlock()
		all = append(all, found...)
		return err
	})
	slices.Sort(all)
	return all, err
}

// server looks for what breaks promises without an error: what is wrong otherwise, Redis says itself.
func server(ctx context.Context, client redis.UniversalClient) (findings []string, err error) {
	name := "redis"
	if c, ok := client.(*redis.Client); ok {
		name += " " + c.Options().Addr
	}
	begun := time.Now()
	at, err := client.Time(ctx).Result()
	if off := max(time.Until(at), begun.Sub(at)); err == nil && off > time.Second {
		findings = append(findings, fmt.Sprintf("%s: its clock is %v off this machine's: must be within 1s, "+
			"or deadlines and expected starts are off by that", name, off.Round(time.Millisecond)))
	}
	info, noInfo := client.InfoMap(ctx).Result()
	if policy := info["Memory"]["maxmemory_policy"]; policy != "" && policy != "noeviction" {
		findings = append(findings, fmt.Sprintf("%s: maxmemory-policy is %s: must be noeviction, "+
			"or windows and waiting tasks are forgotten", name, policy))
	}
	var refused redis.Error
	if err = errors.Join(err, noInfo); errors.As(err, &refused) && !redis.IsAuthError(err) {
		err = nil // the user may not ask
	}
	return findings, err
}

var mayNot = regexp.MustCompile(`ACL failure in script|The user executing the script can't `) // in scripts, by release

// Forbidden reports whether an error says that Redis does not know the user, or does not let it call something.
func Forbidden(err error) bool {
	return redis.IsAuthError(err) || redis.IsPermissionError(err) || err != nil && mayNot.MatchString(err.Error())
}

var cannotServe = regexp.MustCompile(`(^|-)(BUSY|CLUSTERDOWN|LOADING|MASTERDOWN|MISCONF|MOVED|NOREPLICAS|OOM|READONLY|TRYAGAIN) `)

// CannotServe reports whether Redis answered that it cannot serve now. Before 7.0 an error of the script wraps it.
func CannotServe(err error) bool { return cannotServe.MatchString(err.Error()) }
