package throttle_test

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

// said answers every script with the same reply, without a Redis.
type said struct{ reply []any }

func (said) DialHook(next redis.DialHook) redis.DialHook { return next }
func (said) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (s *said) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(_ context.Context, cmd redis.Cmder) error {
		cmd.(*redis.Cmd).SetVal(s.reply)
		return nil
	}
}

// written is a reply as bytes, for the corpus, and readValues is what bytes say as a reply.
func written(reply ...any) (b []byte) {
	for _, v := range reply {
		switch v := v.(type) {
		case int64:
			b = binary.BigEndian.AppendUint64(append(b, 0), uint64(v))
		case int:
			b = append(b, 1, byte(v))
		case string:
			b = append(append(b, 2, byte(len(v))), v...)
		case nil:
			b = append(b, 3)
		case float64:
			b = append(b, 4)
		case error:
			b = append(b, 5)
		case []any:
			b = append(b, 6)
		}
	}
	return b
}

func readValues(b []byte) (reply []any) {
	for len(b) > 0 {
		kind := b[0]
		b = b[1:]
		switch {
		case kind == 0 && len(b) >= 8:
			reply, b = append(reply, int64(binary.BigEndian.Uint64(b))), b[8:]
		case kind == 1 && len(b) >= 1:
			reply, b = append(reply, int64(b[0])), b[1:]
		case kind == 2 && len(b) >= 1:
			n := min(int(b[0]), len(b)-1)
			reply, b = append(reply, string(b[1:1+n])), b[1+n:]
		case kind == 3:
			reply = append(reply, nil)
		case kind == 4:
			reply = append(reply, math.NaN())
		case kind == 5:
			reply = append(reply, errors.New("ERR of one value"))
		default:
			reply = append(reply, []any{int64(kind)})
		}
	}
	return reply
}

// Whatever a script replies: it is a decision that makes sense, or ErrReply.
func FuzzReply(f *testing.F) {
	const us = 1_800_000_000_000_000
	now := int64(us)
	for _, reply := range [][]any{
		{},
		{1, now, now, 0, 1, 0, now + 5, 2, 0, now + 9},                                // granted
		{2, now - 9, now - 9, 0, 1, 0, now, 2, 0, now},                                // granted before
		{0, now, now + 7, 0, 1, now + 7, now + 9, 2, 0, now + 9},                      // denied
		{0, now, now + 7, 61_000_000, 1, now + 7, now + 9, 2, 0, now + 9},             // by a clock that was set back
		{0, now, now, 0, 1, 0, now, 2, 0, now},                                        // denied for no time
		{3, now, now + 7, 0, 1, 0, now, 2, 0, now, now + 5, "default/a", "default%2"}, // planned, with a line
		{4, now, now + 7, 0, 1, 0, now, 2, 0, now, 0},
		{5, now, now, 0, 1, 0, now, 2, 0, now, 0},
		{6, now, now + 7, 0, 1, 0, now, 2, 0, now, now, "\xff%zz", ""},
		{7, now, now + 7, 0, 1, now + 7, now, 2, 0, now},
		{int64(-1), now, now, 0, 1, 0, now, 2, 0, now},
		{1, now, now, 0, 1, 0, now, 2, 0},
		{1, now, now, 0, 1, 0, now, 2, 0, now, "due"},
		{1, now, now, 0, 1, 0, now, 2, 0, now, now, 5},
		{1, now, now, 0, int64(math.MinInt64), 0, now, int64(math.MaxInt64), 0, now},
		{0, int64(math.MaxInt64), int64(math.MinInt64), int64(math.MinInt64), 1, int64(math.MaxInt64), int64(math.MinInt64), 1, 0, 0},
		{nil, math.NaN(), errors.New(""), []any{}},
		{0, now, now, 0}, {0, now, now, 0, now + 4, "default/a"}, // of Pump
	} {
		f.Add(written(reply...))
	}
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"}) // to which nothing is sent
	f.Cleanup(func() { client.Close() })
	s := &said{}
	client.AddHook(s)
	p := policy(
		throttle.Window{Name: "own", Limit: 5, Period: time.Minute},
		throttle.Window{Name: "all", Limit: 9, Period: time.Minute, Per: []string{}, Algorithm: throttle.GCRA, Burst: 3},
	)
	p.Tenants = map[string]throttle.Tenant{"exempt": {Exempt: true}}
	l, err := throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{p}})
	if err != nil {
		f.Fatal(err)
	}
	var lines []throttle.Line
	f.Cleanup(l.OnLine(func(line throttle.Line) { lines = append(lines, line) }))
	r := acme(1)
	r.Ticket = "default/a"

	f.Fuzz(func(t *testing.T, b []byte) {
		s.reply, lines = readValues(b), nil
		ctx := t.Context()
		check := func(verb string, d throttle.Decision, err error) {
			t.Helper()
			var refused *throttle.RefusedError
			switch {
			case errors.Is(err, throttle.ErrReply):
				if d.Granted || d.Windows != nil {
					t.Errorf("%s of %v: %v with %+v", verb, s.reply, err, d)
				}
				return
			case errors.As(err, &refused) && verb == "Plan":
				_ = refused.Error()
			case err != nil:
				t.Errorf("%s of %v: %v", verb, s.reply, err)
				return
			}
			if status, ok := s.reply[0].(int64); !ok || status < 0 || status > 6 {
				t.Errorf("%s of %v: taken for a decision", verb, s.reply)
			}
			if len(d.Windows) != 2 || d.ClockBehind < 0 || d.RetryIn < 0 || d.Granted && d.RetryIn != 0 ||
				!d.Granted && d.RetryIn == 0 && (verb == "Reserve" || verb == "Peek") {
				t.Errorf("%s of %v: %+v", verb, s.reply, d)
			}
			for _, w := range d.Windows {
				if w.Used < 0 || w.Remaining < 0 || w.Remaining > w.Burst || w.RetryIn < 0 || d.Granted && w.Denied {
					t.Errorf("%s of %v: %+v", verb, s.reply, w)
				}
			}
			if reason := d.Reason(); d.Granted != (reason == "") || d.EarliestReset() > d.RetryIn {
				t.Errorf("%s of %v: reason %q, %+v", verb, s.reply, reason, d)
			}
		}
		d, err := l.Reserve(ctx, r)
		check("Reserve", d, err)
		if err == nil && d.Granted && d.Reservation.Nonce == "" {
			t.Errorf("Reserve of %v: no reservation", s.reply)
		}
		d, err = l.Peek(ctx, r)
		check("Peek", d, err)
		exempt := r
		exempt.Tenant = "exempt"
		d, err = l.Reserve(ctx, exempt)
		check("Reserve", d, err)
		if err == nil && !d.Granted {
			t.Errorf("an exempt tenant's Reserve of %v: %+v", s.reply, d)
		}
		d, err = l.Plan(ctx, r, time.Hour, 5)
		check("Plan", d, err)
		d, err = l.Cancel(ctx, throttle.Reservation{Request: nonce(r, "n"), At: time.UnixMicro(us)})
		check("Cancel", d, err)
		for _, err := range []error{l.Leave(ctx, "p", "acme", "default/a"), l.Skip(ctx, "p", "acme", "default/a"), l.Pump(ctx, "p", "acme")} {
			if err != nil && !errors.Is(err, throttle.ErrReply) {
				t.Errorf("%v: %v", s.reply, err)
			}
		}
		if _, err := l.Lead(ctx, "p", time.Second, throttle.Leads{Take: 1}); err != nil && !errors.Is(err, throttle.ErrReply) {
			t.Errorf("Lead of %v: %v", s.reply, err)
		}
		for _, line := range lines {
			if line.Policy != "p" {
				t.Errorf("a line of %+v", line)
			}
		}
	})
}
