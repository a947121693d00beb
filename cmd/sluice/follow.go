package main

import (
	"context"
	"log/slog"

	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
	"github.com/sluice-go/sluice/cmd/sluice/internal/redisconn"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/policyfile"
)

// follow puts changes of the policy file in force while the jobs run, and overrides and pauses of
// operators, if they can reach this Redis. The function that it returns ends that.
func (c *RunCommand) follow(
	ctx context.Context, limiter *throttle.Limiter, server *redisconn.Server,
	list []jobs.Job, logger *slog.Logger,
) (end func(), err error) {
	var follower *control.Follower
	if _, kept, _ := c.address(c.Env); kept {
		store, err := control.NewStore(server.Client, c.prefix())
		if err != nil {
			return nil, err
		}
		config := control.FollowConfig{KeepPolicies: true, Limiter: limiter, Logger: logger, Store: store}
		follower, err = control.Follow(ctx, config)
		if err != nil {
			return nil, err
		}
	}
	watching, stop := context.WithCancel(ctx)
	if c.Policies != "-" {
		go policyfile.Watch(watching, c.Policies, policyfile.WatchConfig{
			Load:   func() ([]throttle.Policy, error) { return c.loadPolicies(c.Policies) },
			Logger: logger,
			Put: func(policies []throttle.Policy) error {
				other, err := throttle.New(throttle.Config{Client: server.Client, Policies: policies})
				if err == nil {
					err = checkJobs(ctx, other, c.Policies, list) // each must have a policy, and fit
				}
				if err != nil {
					return err
				}
				return limiter.SetPolicies(policies)
			},
		})
	}
	return func() {
		stop()
		if follower != nil {
			follower.Close()
		}
	}, nil
}
