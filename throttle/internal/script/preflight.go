package script

import (
	"context"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/redischeck"
)

// needed are the commands that scripts and this package call, Forget aside, with harmless arguments. The letters s, h
// and z stand for keys of these types, which exist only during the check.
var needed = []any{
	"set s 1 PX 1000", "get s", "getrange s 0 1", "mget s", "exists s", "expire s 1", "time",
	"hset h a 1", "expire h 1", "hmget h a", "hgetall h", "hlen h", "hscan h 0", "hdel h b",
	"zadd z 1 a", "expire z 1", "zcard z", "zcount z 0 1", "zscore z a", "zrank z a", "zrange z 0 0",
	"zrangebyscore z 0 1", "zrem z b", "zremrangebyrank z 5 6", "zremrangebyscore z 5 6", "zscan z 0",
	"del s h z",
}

// preflight calls each command in ARGV, with keys that begin with KEYS[1], and replies which commands failed and why.
var preflight = redis.NewScript(`
local refused = {}
for i = 1, #ARGV do
  local words = {}
  for word in string.gmatch(ARGV[i], '%S+') do
    words[#words + 1] = #words > 0 and string.match(word, '^[shz]$') and KEYS[1] .. word or word
  end
  local reply = redis.pcall(unpack(words))
  if type(reply) == 'table' and reply.err then refused[#refused + 1] = words[1] .. ' ' .. reply.err end
end
return refused
`)

// Preflight returns an error with the commands that the limiter needs and the user of Redis may not call. It
// leaves nothing in Redis. Other errors are go-redis's.
func (r *Runner) Preflight(ctx context.Context) error {
	replies, err := preflight.Run(ctx, r.Client, []string{Prefix(r.Prefix, "!")}, needed...).StringSlice()
	if err != nil || len(replies) == 0 {
		return err
	}
	var refused []string
	for _, reply := range replies {
		name, text, _ := strings.Cut(reply, " ")
		if !redischeck.Forbidden(fmt.Errorf("%s", text)) {
			return fmt.Errorf("%s: %s", name, text)
		}
		refused = append(refused, name)
	}
	return fmt.Errorf("its user may not call %s: must be allowed", strings.Join(refused, ", "))
}
