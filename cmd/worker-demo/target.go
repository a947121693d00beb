package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/redisconn"
)

// redisURLVariable holds the URL of Redis if no flag tells it.
const redisURLVariable = "SLUICE_REDIS_URL"

// redisAddress is where Redis is, and whether anything says so.
func (c *RunCommand) redisAddress() (a redisconn.Address, found bool, err error) {
	switch {
	case c.Redis != "":
		a = redisconn.Address{Source: "--redis", URL: c.Redis}
	case c.RedisFile != "":
		text, err := os.ReadFile(c.RedisFile)
		if err != nil {
			return a, true, fmt.Errorf("--redis-file: %w", err)
		}
		a = redisconn.Address{Source: "--redis-file " + c.RedisFile, URL: strings.TrimSpace(string(text))}
	default:
		url, set := c.Env(redisURLVariable)
		if !set || url == "" {
			return a, false, nil
		}
		a = redisconn.Address{Source: "$" + redisURLVariable, URL: url}
	}
	a, err = a.Expand(c.Env)
	return a, true, err
}

func (c *RunCommand) openRedis(ctx context.Context) (*redisconn.Server, error) {
	address, found, err := c.redisAddress()
	if err != nil {
		return nil, err
	}
	if !found && c.RedisTLS != (redisconn.TLS{}) {
		return nil, errors.New("there are TLS files, but no Redis: --redis must tell its URL")
	}
	if !found {
		return redisconn.Embedded()
	}
	return redisconn.Open(ctx, address, c.RedisTLS)
}

// prefix is what everything of this run in Redis begins with.
func (c *RunCommand) prefix() string {
	if c.Prefix == "" {
		return ""
	}
	return c.Prefix + ":"
}

// queueName names a queue for this jobs file alone, the same from wherever it is run.
func (c *RunCommand) queueName() (string, error) {
	if c.Queue != "" {
		return c.prefix() + c.Queue, nil
	}
	if c.Jobs == "-" {
		return c.prefix() + "worker-demo:stdin", nil
	}
	abs, err := filepath.Abs(c.Jobs)
	if err != nil {
		return "", fmt.Errorf("--jobs: %w", err)
	}
	plain := regexp.MustCompile(`[^A-Za-z0-9_.-]`).ReplaceAllString(filepath.Base(abs), "_")
	return fmt.Sprintf("%sworker-demo:%s:%.6x", c.prefix(), plain, sha256.Sum256([]byte(abs))), nil
}
