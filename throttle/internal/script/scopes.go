package script

import (
	"context"
	"errors"
	"strings"

	"github.com/redis/go-redis/v9"
)

// ForgetScopes is Forget for the scopes of these attributes whose values are to go.
func (r *Runner) ForgetScopes(
	ctx context.Context, line string, attributes []string, goes func(values []string) bool,
) (n int, err error) {
	prefix := Prefix(r.prefix, line)
	begin := prefix + "w:" + strings.Join(attributes, ",") + ":"
	node := redis.Cmdable(r.client)
	if nodes, ok := r.client.(interface {
		MasterForKey(ctx context.Context, key string) (*redis.Client, error)
	}); ok { // they are on one node
		master, err := nodes.MasterForKey(ctx, begin)
		if err != nil {
			return 0, err
		}
		node = master
	}
	for cursor := uint64(0); ; {
		found, next, err := node.Scan(ctx, cursor, begin+"*", 1000).Result()
		if err != nil {
			return n, err
		}
		var keys []string
		for _, key := range found {
			values := strings.Split(strings.TrimPrefix(key, begin), ",")
			for i, value := range values {
				values[i] = Unescape(value)
			}
			if len(values) == len(attributes) && goes(values) {
				keys = append(keys, strings.TrimPrefix(key, prefix))
			}
		}
		some, err := r.Forget(ctx, line, keys...)
		n += some
		if cursor = next; err != nil || cursor == 0 {
			return n, err
		}
	}
}

// Forget deletes scopes by their keys, and returns how many there were.
func (r *Runner) Forget(ctx context.Context, line string, keys ...string) (int, error) {
	if len(keys) == 0 {
		return 0, nil
	}
	full := make([]string, len(keys))
	for i, key := range keys {
		full[i] = Prefix(r.prefix, line) + key
	}
	n, err := r.client.Del(ctx, full...).Result()
	return int(n), err
}

// LookAgain lets the next take look at all that waits in a line, as it does when limits have changed.
func (r *Runner) LookAgain(ctx context.Context, line string) error {
	err := r.client.SetArgs(ctx, Prefix(r.prefix, line)+"l", "0 -", redis.SetArgs{Mode: "XX", KeepTTL: true}).Err()
	if errors.Is(err, redis.Nil) { // nobody waits
		return nil
	}
	return err
}
