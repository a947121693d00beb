package script

import (
	"context"
	"strings"

	"github.com/redis/go-redis/v9"
)

// Scopes calls do for pages of the keys that scopes of these attributes have, without the prefix,
// and for the values of the attributes. Some may come twice.
func (r *Runner) Scopes(
	ctx context.Context, line string, attributes []string, do func(keys []string, values [][]string) error,
) error {
	prefix := Prefix(r.prefix, line)
	begin := prefix + "w:" + strings.Join(attributes, ",") + ":"
	node := redis.Cmdable(r.client)
	if nodes, ok := r.client.(interface {
		MasterForKey(ctx context.Context, key string) (*redis.Client, error)
	}); ok { // they are on one node
		master, err := nodes.MasterForKey(ctx, begin)
		if err != nil {
			return err
		}
		node = master
	}
	for cursor := uint64(0); ; {
		found, next, err := node.Scan(ctx, cursor, begin+"*", 1000).Result()
		if err != nil {
			return err
		}
		var keys []string
		var values [][]string
		for _, key := range found {
			list := strings.Split(strings.TrimPrefix(key, begin), ",")
			if len(list) != len(attributes) {
				continue
			}
			for i, value := range list {
				list[i] = Unescape(value)
			}
			keys, values = append(keys, strings.TrimPrefix(key, prefix)), append(values, list)
		}
		if err := do(keys, values); err != nil {
			return err
		}
		if cursor = next; cursor == 0 {
			return nil
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

// lookAgain has the next take look at all nodes of a line, as it does when limits have changed.
var lookAgain = redis.NewScript(`if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[2], 'limits', '-') end return 0`)

// LookAgain has the next take look at all that wait in a line.
func (r *Runner) LookAgain(ctx context.Context, line string) error {
	prefix := Prefix(r.prefix, line)
	return lookAgain.Run(ctx, r.client, []string{prefix + "q", prefix + "u"}).Err()
}
