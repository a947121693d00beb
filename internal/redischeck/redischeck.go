// Package redischeck finds what is wrong with the setup of a Redis, and what its errors mean.
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

// Findings returns a sentence for each setting that is wrong: see throttle.Limiter.CheckRedis. It returns the error of
// go-redis if Redis does not answer, or does not know the user.
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

// server checks one server for settings that break promises without an error. Redis itself reports other bad settings.
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
	info, infoErr := client.InfoMap(ctx).Result()
	if policy := info["Memory"]["maxmemory_policy"]; policy != "" && policy != "noeviction" {
		findings = append(findings, fmt.Sprintf("%s: maxmemory-policy is %s: must be noeviction, "+
			"or windows and waiting tasks are forgotten", name, policy))
	}
	var refused redis.Error
	if err = errors.Join(err, infoErr); errors.As(err, &refused) && !redis.IsAuthError(err) {
		err = nil // Redis does not tell, mostly as its user may not ask: no finding
	}
	return findings, err
}

var lacksPermission = regexp.MustCompile(`ACL failure in script|The user executing the script can't |its user may not call `)

// Forbidden reports whether Redis, a script or a preflight refuses the user, or what it calls.
func Forbidden(err error) bool {
	return redis.IsAuthError(err) || redis.IsPermissionError(err) || err != nil && lacksPermission.MatchString(err.Error())
}

var cannotServe = regexp.MustCompile(`(^|-)(BUSY|CLUSTERDOWN|LOADING|MASTERDOWN|MISCONF|MOVED|NOREPLICAS|OOM|READONLY|TRYAGAIN) `)

// CannotServe reports whether Redis answered that it cannot serve now. Before 7.0 the error of a script contains it.
func CannotServe(err error) bool { return cannotServe.MatchString(err.Error()) }
