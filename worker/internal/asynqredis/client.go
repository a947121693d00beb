// Package asynqredis is the only package that knows how asynq 0.26 keeps its tasks in Redis: its keys,
// its messages, the shapes of its script calls, and our scripts on the same keys.
//
// Every script works on one queue, whose keys share a slot of a Redis Cluster. Most take many tasks a
// call. go-redis may repeat any call after its reply was lost. TestCallsOfAsynq, in faulttest, compares
// this knowledge with the asynq in use.
package asynqredis

import (
	"cmp"
	"context"
	"crypto/rand"
	"embed"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/redischeck"
)

const (
	maxBulk      = 250                      // the most tasks of one script call: Redis serves nobody else while a script runs
	LeaseFor     = 30 * time.Second         // how long asynq leases a task that it picks up
	databaseKept = time.Second              // how long Database caches an ID: a Redis that was emptied may get another
	databaseTTL  = 3 * 366 * 24 * time.Hour // longer than any line. A client that knows a lost ID writes it again
)

//go:embed lua
var lua embed.FS

// scripts has the files of folder lua by name, as scripts. All but batch_count begin with functions.lua.
var scripts = func() map[string]*redis.Script {
	all := map[string]*redis.Script{}
	functions, _ := lua.ReadFile("lua/functions.lua") // embedded files can be read
	files, _ := lua.ReadDir("lua")
	for _, file := range files {
		code, _ := lua.ReadFile("lua/" + file.Name())
		if file.Name() != "batch_count.lua" { // End sends the whole text with each call
			code = slices.Concat(functions, code)
		}
		all[strings.TrimSuffix(file.Name(), ".lua")] = redis.NewScript(string(code))
	}
	return all
}()

// A Ref names a task: IDs are unique per queue only.
type Ref struct{ Queue, ID string }

// Connect returns the client that an asynq.RedisConnOpt makes.
func Connect(opt interface{ MakeRedisClient() any }) (redis.UniversalClient, error) {
	if opt == nil {
		return nil, errors.New("worker: the asynq.RedisConnOpt is nil: must be such as asynq.RedisClientOpt{Addr: ...}")
	}
	client, ok := opt.MakeRedisClient().(redis.UniversalClient)
	if !ok {
		return nil, fmt.Errorf("worker: %T makes no redis.UniversalClient: use one of asynq's own options", opt)
	}
	return client, nil
}

// A Client runs our scripts on asynq's Redis. It is safe for concurrent use.
type Client struct {
	redis   redis.UniversalClient
	process string // identifies this client's calls
	calls   atomic.Uint64
	known   atomic.Pointer[database]
}

// A database is a Redis database by its random ID, and when that was last read.
type database struct {
	id   string
	seen time.Time
}

// New returns a client that uses the connection. The caller closes the connection.
func New(client redis.UniversalClient) *Client {
	c := &Client{redis: client, process: rand.Text()[:16]}
	c.known.Store(&database{})
	return c
}

func (c *Client) Redis() redis.UniversalClient { return c.redis }

// NewCall returns a key that identifies a call and its repeats: "PROCESS/SECONDS/NUMBER". Recover parses it.
func (c *Client) NewCall() string {
	return c.process + "/" + strconv.FormatInt(time.Now().Unix(), 36) + "/" + strconv.FormatUint(c.calls.Add(1), 36)
}

// Database returns the random ID of this Redis database: a limiter may serve several.
func (c *Client) Database(ctx context.Context) (string, error) {
	known := c.known.Load()
	if time.Since(known.seen) < databaseKept {
		return known.id, nil
	}
	const key = "sluice:asynq"
	id, err := c.redis.Get(ctx, key).Result()
	if errors.Is(err, redis.Nil) {
		if err = c.redis.SetNX(ctx, key, cmp.Or(known.id, c.process[:8]), databaseTTL).Err(); err == nil {
			id, err = c.redis.Get(ctx, key).Result()
		}
	}
	if err == nil {
		known = &database{id, time.Now()}
		c.known.Store(known)
	} else if known.id == "" { // otherwise the cached one serves meanwhile
		return "", fmt.Errorf("worker: asking for the ID of asynq's Redis: %w", err)
	}
	return known.id, nil
}

func prefix(queue string) string { return "asynq:{" + queue + "}:" }

// keys returns keys of a queue. A name is the part of a key after the prefix.
func keys(queue string, names ...string) (all []string) {
	for _, name := range names {
		all = append(all, prefix(queue)+name)
	}
	return all
}

// IsNotFound reports whether a call that ends an attempt failed because the task is not active.
func IsNotFound(err error) bool { return err != nil && strings.HasPrefix(err.Error(), "NOT FOUND") }

// IsOutage reports whether a call failed that may succeed later: Redis did not answer, or cannot serve now.
func IsOutage(err error) bool {
	if err == nil || errors.Is(err, redis.ErrClosed) {
		return false
	}
	return !errors.As(err, new(redis.Error)) || redischeck.CannotServe(err)
}

// WholeSecond rounds up to a whole second. Asynq truncates times to seconds, so a task would start too early.
func WholeSecond(at time.Time) time.Time { return at.Add(time.Second - 1).Truncate(time.Second) }

// score returns a time as asynq stores it.
func score(at time.Time) int64 { return WholeSecond(at).Unix() }
