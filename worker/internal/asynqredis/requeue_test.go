package asynqredis_test

import (
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

func TestARequeueSchedulesAnActiveTask(t *testing.T) {
	each(t, func(s *site) {
		s.store("a")
		picks, err := s.Pick(s.Context(), queue, s.Call(), s.waiting("a"))
		s.ok(err)
		at := time.Now().Add(time.Minute)
		requeued := asynqredis.Requeued{
			Ref: asynqredis.Ref{Queue: queue, ID: "a"}, Message: picks[0].Message.WithError("throttled: x", time.Now()),
			At: at, DenialID: "n1", Mark: asynqredis.Mark(s.key("a"), time.Now(), s.Call()),
		}
		s.ok(s.Requeue(s.Context(), requeued))
		s.wantStates("a scheduled")
		info, err := s.inspector.GetTaskInfo(queue, "a")
		s.ok(err)
		if info.LastErr != "throttled: x" || info.NextProcessAt.Before(at) {
			t.Errorf("asynq's tools show %+v", info)
		}
		// Picked again: a requeue that is repeated leaves it to the server that has it now.
		_, err = s.Pick(s.Context(), queue, s.Call(), s.waiting("a"))
		s.ok(err)
		s.ok(s.Requeue(s.Context(), requeued))
		s.wantStates("a active")
		// One that waits in no line cannot be picked.
		requeued.DenialID, requeued.Mark = "n2", ""
		s.ok(s.Requeue(s.Context(), requeued))
		picks, err = s.Pick(s.Context(), queue, s.Call(), s.waiting("a"))
		s.ok(err)
		if picks[0].Found != asynqredis.Gone {
			t.Errorf("%+v", picks[0])
		}
		requeued.DenialID = "n3"
		if err := s.Requeue(s.Context(), requeued); !asynqredis.IsNotFound(err) {
			t.Errorf("requeueing what is not active: %v", err)
		}
	})
}

// A requeue touches the lock of a task of ours alone, only as its holder, and never shortens it.
func TestARequeueNeverShortensALock(t *testing.T) {
	each(t, func(s *site) {
		ctx := s.Context()
		for name, row := range map[string]struct {
			ours   bool
			holder string
			ttl    time.Duration
			want   time.Duration
		}{
			"shorter":        {true, "a", time.Second, 131 * time.Second},
			"longer":         {true, "a", time.Hour, time.Hour},
			"free":           {true, "", 0, 131 * time.Second},
			"another's":      {true, "b", 5 * time.Second, 5 * time.Second},
			"not ours":       {false, "a", 5 * time.Second, 5 * time.Second},
			"not ours, free": {false, "", 0, 0},
		} {
			s.redis.FlushAll(ctx)
			s.redis.RPush(ctx, "asynq:{default}:active", "a")
			if row.ours {
				s.redis.HSet(ctx, "asynq:{default}:t:a", "sluice_lock", 10)
			}
			if row.holder != "" {
				s.redis.Set(ctx, "asynq:{default}:unique:x", row.holder, row.ttl)
			}
			message := protowire.AppendString(protowire.AppendTag(nil, 10, protowire.BytesType), "asynq:{default}:unique:x")
			s.ok(s.Requeue(ctx, asynqredis.Requeued{
				Ref: asynqredis.Ref{Queue: queue, ID: "a"}, Message: message, At: time.Now().Add(2 * time.Minute), DenialID: name,
			}))
			got, holder := max(0, s.redis.TTL(ctx, "asynq:{default}:unique:x").Val()), s.redis.Get(ctx, "asynq:{default}:unique:x").Val()
			wantHolder := row.holder
			if row.ours && wantHolder == "" {
				wantHolder = "a"
			}
			// Redis rounds to seconds, and calls take time: but less than what tells 5 s from none.
			if (got-row.want).Abs() >= 5*time.Second || holder != wantHolder {
				s.Errorf("%s: %q holds it for %v, want %q for %v", name, holder, got, wantHolder, row.want)
			}
		}
	})
}
