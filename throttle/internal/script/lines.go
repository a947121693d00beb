package script

import (
	"context"
	"slices"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"
)

// Flows calls do with pages of the flows that wait in a line. Some flows may come twice.
func (r *Runner) Flows(ctx context.Context, line string, do func(flows []string) error) error {
	return r.pages(ctx, Prefix(r.Prefix, line)+"f", 100, func(flows, _ []string) error { return do(flows) })
}

// Tickets calls do with pages of the tickets in a line, without claims. Some tickets may come twice.
func (r *Runner) Tickets(ctx context.Context, line string, do func([]Ticket) error) error {
	return r.pages(ctx, Prefix(r.Prefix, line)+"t", 500, func(names, records []string) error {
		var tickets []Ticket
		for i, name := range names {
			if t, err := ReadTicket(name, records[i]); err == nil && !strings.HasPrefix(name, "!") {
				tickets = append(tickets, t)
			}
		}
		return do(tickets)
	})
}

// CountTickets returns how many tickets are in a line, including claims.
func (r *Runner) CountTickets(ctx context.Context, line string) (int64, error) {
	return r.Client.HLen(ctx, Prefix(r.Prefix, line)+"t").Result()
}

// pages calls do with pages of about n fields of a hash, and their values.
func (r *Runner) pages(ctx context.Context, key string, n int64, do func(keys, values []string) error) error {
	for cursor := uint64(0); ; {
		page, next, err := r.Client.HScan(ctx, key, cursor, "", n).Result()
		var fields, values []string
		for pair := range slices.Chunk(page, 2) {
			fields, values = append(fields, pair[0]), append(values, pair[1])
		}
		if err == nil {
			err = do(fields, values)
		}
		if cursor = next; err != nil || cursor == 0 {
			return err
		}
	}
}

// Forget deletes the scopes with these attributes, of one tenant or with "" of all, and returns how many
// there were. Unless there can be only one, it scans all keys of Redis.
func (r *Runner) Forget(ctx context.Context, line string, attributes []string, tenant string) (n int64, err error) {
	values := slices.Repeat([]string{"*"}, len(attributes))
	if i := slices.Index(attributes, "tenant"); i >= 0 && tenant != "" {
		values[i] = Escape(tenant)
	}
	// Escaped values have neither a comma nor a character with a meaning in patterns.
	key := Prefix(r.Prefix, line) + scopeKeys(attributes, strings.Join(values, ","))
	if !strings.Contains(key, "*") {
		return r.Client.Del(ctx, key).Result()
	}
	client := r.Client
	if c, ok := client.(interface {
		MasterForKey(context.Context, string) (*redis.Client, error)
	}); ok {
		if client, err = c.MasterForKey(ctx, key); err != nil { // all keys of a line are on one node
			return 0, err
		}
	}
	err = ScanAll(ctx, client, key, func(keys []string) error {
		deleted, err := r.Client.Del(ctx, keys...).Result()
		n += deleted
		return err
	})
	return n, err
}

// ScanAll calls do with pages of the keys that match a pattern, of each master of a Cluster, one page at a time.
func ScanAll(ctx context.Context, client redis.UniversalClient, pattern string, do func(keys []string) error) error {
	var mu sync.Mutex
	scan := func(ctx context.Context, node redis.Cmdable) error {
		for cursor := uint64(0); ; {
			keys, next, err := node.Scan(ctx, cursor, pattern, 5000).Result()
			if mu.Lock(); err == nil && len(keys) > 0 {
				err = do(keys)
			}
			mu.Unlock()
			if cursor = next; err != nil || cursor == 0 {
				return err
			}
		}
	}
	if c, ok := client.(*redis.ClusterClient); ok {
		return c.ForEachMaster(ctx, func(ctx context.Context, node *redis.Client) error { return scan(ctx, node) })
	}
	return scan(ctx, client)
}

// LookAgain lets the next takes look at all nodes of a line again, as if the last look was long ago, at other limits.
func (r *Runner) LookAgain(ctx context.Context, line string) error {
	return r.Client.SetXX(ctx, Prefix(r.Prefix, line)+"l", "0 -", redis.KeepTTL).Err() // if the key exists: somebody waits
}
