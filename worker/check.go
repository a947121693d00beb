package worker

import (
	"context"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// checkTimeout bounds the look at how the Redises are set up, when a server starts.
const checkTimeout = 5 * time.Second

// checkRedis logs, once, what is wrong with how the Redises of the limiter and of asynq are set up.
// A Redis that does not answer is not checked.
func (ad *Adapter) checkRedis() {
	asynq := ad.asynq.Load()
	if asynq == nil { // the server has a connection of its own, which the middleware reports
		return
	}
	ctx, cancel := context.WithTimeout(ad.shutdownGrace, checkTimeout)
	defer cancel()
	findings, _ := ad.config.Limiter.CheckRedis(ctx)
	queue, _ := throttle.CheckRedis(ctx, asynq.Redis())
	for _, finding := range queue {
		if !slices.Contains(findings, finding) { // they are often the same Redis
			findings = append(findings, finding)
		}
	}
	for _, finding := range findings {
		ad.config.Logger.Warn("worker: Redis is not set up for throttling", "finding", finding)
	}
}
