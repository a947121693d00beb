package main

import (
	"context"
	"encoding/base64"
	"fmt"
	"net/url"
	"strings"

	"github.com/redis/go-redis/v9"
)

// ticketsKey is the hash of the tickets in the policy's line, by name
// (throttle/internal/script/lua/line.lua).
const ticketsKey = "sluice:{" + policyName + "}:t"

// taskOf returns the ID of the task that a ticket is for, by the ticket's name: the queue, a slash,
// and the ID, escaped. An ID that is a UUID is packed (throttle/internal/script/keys.go).
func taskOf(ticket string) (id string, ok bool) {
	_, id, ok = strings.Cut(ticket, "/")
	if packed, short := strings.CutPrefix(id, "!"); short {
		u, err := base64.RawURLEncoding.DecodeString(packed)
		if err != nil || len(u) != 16 {
			return "", false
		}
		return fmt.Sprintf("%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:]), ok
	}
	id, err := url.PathUnescape(id)
	return id, ok && err == nil
}

// waitingTasks returns the IDs of the tasks that have a ticket in line.
func waitingTasks(ctx context.Context, client *redis.Client) (ids []string, err error) {
	tickets, err := client.HKeys(ctx, ticketsKey).Result()
	for _, ticket := range tickets {
		id, ok := taskOf(ticket)
		if !ok {
			return nil, fmt.Errorf("ticket %q is not of the shape that was expected", ticket)
		}
		ids = append(ids, id)
	}
	return ids, err
}
