package main

import (
	"context"
	"os"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/cmd/sluice/internal/environ"
	"github.com/sluice-go/sluice/cmd/sluice/internal/redisconn"
)

// redisURLVariable names the environment variable with the URL of Redis. Flags replace it.
const redisURLVariable = "SLUICE_REDIS_URL"

// redisFlags say where Redis is, and how to connect by TLS.
type redisFlags struct {
	Redis     string // its URL
	RedisFile string // a file with the URL
	RedisTLS  redisconn.TLS
}

func (c *redisFlags) flags(usage string) []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "redis", Usage: usage, Destination: &c.Redis},
		&cli.StringFlag{Name: "redis-file", Destination: &c.RedisFile, TakesFile: true,
			Usage: "read that URL from `FILE`"},
		&cli.StringFlag{Name: "redis-ca", Destination: &c.RedisTLS.CA, TakesFile: true,
			Usage: "trust the certificates of `FILE` alone, instead of the system's"},
		&cli.StringFlag{Name: "redis-cert", Destination: &c.RedisTLS.Cert, TakesFile: true,
			Usage: "show Redis the client certificate of `FILE`"},
		&cli.StringFlag{Name: "redis-key", Destination: &c.RedisTLS.Key, TakesFile: true,
			Usage: "its key is in `FILE`"},
	}
}

// address returns the URL of Redis, and whether one was given. Its errors are inputErrors.
func (c *redisFlags) address(env environ.Lookup) (a redisconn.Address, given bool, err error) {
	switch {
	case c.Redis != "" && c.RedisFile != "":
		return a, true, badInput("--redis and --redis-file: must not be given together")
	case c.Redis != "":
		a = redisconn.Address{Source: "--redis", URL: c.Redis}
	case c.RedisFile != "":
		text, err := os.ReadFile(c.RedisFile)
		if err != nil {
			return a, true, badInput("--redis-file: %w", err)
		}
		a = redisconn.Address{Source: "--redis-file " + c.RedisFile, URL: strings.TrimSpace(string(text))}
	default:
		url, _ := env(redisURLVariable)
		if url == "" {
			return a, false, nil
		}
		a = redisconn.Address{Source: "$" + redisURLVariable, URL: url}
	}
	return a, true, nil
}

// open connects to Redis. If no URL was given, it starts one in this process.
func (c *redisFlags) open(ctx context.Context, env environ.Lookup) (*redisconn.Server, error) {
	address, given, err := c.address(env)
	switch {
	case err != nil:
		return nil, err
	case !given && c.RedisTLS != (redisconn.TLS{}):
		return nil, badInput("there are TLS files, but no Redis: --redis must be its URL")
	case !given:
		return redisconn.Embedded()
	}
	opt, err := address.Parse(c.RedisTLS)
	if err != nil {
		return nil, inputError{err}
	}
	return redisconn.Open(ctx, address.Source, opt)
}
