package limitertest

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
)

// said answers every script with the same reply, without a Redis.
type said struct{ reply []any }

func (s *said) answer(_ context.Context, cmd redis.Cmder, _ redis.ProcessHook) error {
	script, ok := cmd.(*redis.Cmd)
	if !ok {
		return errors.New("only scripts are answered")
	}
	script.SetVal(s.reply)
	return nil
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

// Any reply of a script is a decision that makes sense, or ErrReply.
func FuzzReply(f *testing.F) {
	const us = 1_800_000_000_000_000
	now := int64(us)
	taken := "q/1 key q|acme requests=1 7 1 acme 0123456789abcdef 1:5:1800000000000005,2:9:1800000000000009 1800000000000000"
	for _, reply := range [][]any{
		// status, at, and for each window used and resets
		{1, now, 1, now + 5, 2, now + 9}, {2, now - 9, 1, now, 2, now}, {1, now}, {8, now}, {8, now, 1, now, 2, now}, {6, now}, {1, now, 1, now + 5, 2},
		// status + 16, at, time, most, behind, nudge, and for each window used, fits and resets
		{},
		{17, now, now, now, 0, 0, 1, 0, now + 5, 2, 0, now + 9},                                   // granted
		{18, now - 9, now - 9, now - 9, 0, 0, 1, 0, now, 2, 0, now},                               // granted before
		{16, now, now + 7, now + 8, 0, 0, 1, now + 7, now + 9, 2, 0, now + 9},                     // denied
		{16, now, now + 7, now + 7, 61_000_000, 0, 1, now + 7, now + 9, 2, 0, now + 9},            // by a clock that was set back
		{16, now, now, now, 0, 0, 1, 0, now, 2, 0, now},                                           // denied for no time
		{19, now, now + 7, now + 6, 0, 0, 1, 0, now, 2, 0, now},                                   // joined
		{19, now, now, now, 0, 1},                                                                 // joined, by Join
		{20, now, now + 7, now + 7, 0, 0}, {21, now, now, now, 0, 0}, {23, now, now + 7, 0, 0, 0}, // refused
		{22, now, now + 7, now + 9, 0, 0, 1, 0, now, 2, 0, now},
		{24, now, now, now, 0, 0, 1, 0, now, 2, 0, now}, {24, now, now, now, 0, 0},
		{9, "SLUICE_STATE key"}, {9, "SLUICE_CLOCK window"}, {9, "ERR"}, {9, 7}, {25, "SLUICE_STATE key"},
		{26, now, now + 7, 0, 0, 0, 1, now + 7, now, 2, 0, now},
		{int64(-1), now, now, now, 0, 0, 1, 0, now, 2, 0, now},
		{17, now, now, now, 0, 0, 1, 0, now, 2, 0},
		{17, now, now, now, 0, 0, 1, 0, now, 2, 0, now, "more"},
		{17, now, now, now, 0, 0, int64(math.MinInt64), 0, now, int64(math.MaxInt64), 0, now},
		{16, int64(math.MaxInt64), int64(math.MinInt64), int64(math.MaxInt64), int64(math.MinInt64), 1, 1, int64(math.MaxInt64), int64(math.MinInt64), 1, 0, 0},
		{nil, math.NaN(), errors.New(""), []any{}},
		{now, 0, 0}, {now, now + 4, 0, taken}, {now, now, 0, taken, taken, ""}, {now, int64(-5), 0, strings.Replace(taken, "requests=1", "-", 1)},
		{now, now, 0, strings.Replace(taken, " 1 acme", " 7 acme", 1)}, {now, now, 0, strings.Replace(taken, "1:5:1800000000000005,2:9:1800000000000009", "-", 1)},
		{now, now, 0, strings.Replace(taken, "q|acme", "other|%zz,x,|", 1)}, {now, now, 0, strings.Replace(taken, ",2:9:1800000000000009", "", 1)},
		{now, now, 0, strings.Replace(taken, "1:5", "-1:5", 1)}, {now, now, 0, strings.Replace(taken, "requests=1", "requests=99999999999999999999,=,x", 1)},
	} {
		f.Add(written(reply...))
	}
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"}) // to which nothing is sent
	f.Cleanup(func() { client.Close() })
	s := &said{}
	client.AddHook(hooktest.Hook(s.answer))
	p := Policy(
		throttle.Window{Name: "own", Limit: 5, Period: time.Minute},
		throttle.Window{Name: "all", Limit: 9, Period: time.Minute, Scope: throttle.ScopeShared, Algorithm: throttle.AlgorithmGCRA, Burst: 3},
	)
	p.Tenants = map[string]throttle.Tenant{"exempt": {Exempt: true}}
	l, err := throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{p}})
	expect.Must(f, err)
	r := Acme(1)
	r.Ticket = Ticket("a")

	f.Fuzz(func(t *testing.T, b []byte) {
		s.reply = readValues(b)
		ctx := t.Context()
		check := func(verb string, d throttle.Decision, err error) {
			t.Helper()
			switch {
			case errors.Is(err, throttle.ErrReply), errors.Is(err, throttle.ErrState), errors.Is(err, throttle.ErrClock):
				expect.That(t, !d.Granted && d.Windows == nil, verb, s.reply, err, "with", d)
				return
			case err != nil:
				t.Errorf("%s of %v: %v", verb, s.reply, err)
				return
			}
			status, ok := s.reply[0].(int64)
			expect.That(t, ok && status >= 0 && status%16 <= 8 && status <= 31, verb, s.reply, "taken for a decision")
			expect.That(t, len(d.Windows) == 2 && d.ClockBehind >= 0 && d.RetryIn >= 0 &&
				d.Latest >= d.RetryIn && (!d.Granted || d.Latest == 0) &&
				(d.Granted || d.RetryIn != 0 || (verb != "Reserve" || d.Queued) && verb != "Peek"),
				verb, s.reply, d)
			for _, w := range d.Windows {
				expect.That(t, w.Used >= 0 && w.Remaining >= 0 && w.Remaining <= w.Burst && w.RetryIn >= 0 &&
					(!d.Granted || !w.Denied), verb, s.reply, w)
			}
			reason := d.Reason()
			expect.That(t, d.Granted == (reason == "") && d.EarliestReset() <= d.RetryIn,
				verb, s.reply, "reason", reason, d)
		}
		d, err := l.Reserve(ctx, r)
		check("Reserve", d, err)
		expect.That(t, err != nil || !d.Granted || len(d.Reservation.ID) == 16, "Reserve of", s.reply, "no reservation")
		d, err = l.Peek(ctx, r)
		check("Peek", d, err)
		exempt := r
		exempt.Tenant = "exempt"
		d, err = l.Reserve(ctx, exempt)
		check("Reserve", d, err)
		expect.That(t, err != nil || d.Granted, "an exempt tenant's Reserve of", s.reply, d)
		d, err = TryCancel(ctx, l, throttle.Reservation{Request: r, At: time.UnixMicro(us), ID: "0123456789abcdef"})
		check("Cancel", d, err)
		known := func(err error) bool {
			return err == nil || errors.Is(err, throttle.ErrReply) || errors.Is(err, throttle.ErrState) || errors.Is(err, throttle.ErrClock)
		}
		r.MaxWait, r.Backlog = time.Hour, 5
		places, err := l.Line("p").Join(ctx, []throttle.Request{r})
		expect.That(t, known(err) && (err == nil) == (len(places) == 1), "Join of", s.reply, places, err)
		for _, p := range places {
			var late *throttle.TooLateError
			var full *throttle.BacklogError
			expect.That(t, (p.Err == nil || errors.As(p.Err, &late) || errors.As(p.Err, &full)) &&
				p.RetryIn >= 0 && p.Latest >= p.RetryIn && (!p.Nudge || p.Err == nil), "Join of", s.reply, p)
		}
		err = l.Line("p").Leave(ctx, r.Ticket)
		expect.That(t, known(err), "Leave of", s.reply, err)
		got, err := l.Line("p").Take(ctx, throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: 5})
		expect.That(t, known(err), "Take of", s.reply, err)
		for _, ticket := range got.Tickets {
			d := ticket.Decision
			expect.That(t, ticket.Queue == "q" && d.Granted != ticket.NeverFits &&
				(len(d.Windows) == 2 || d.Windows == nil), "Take of", s.reply, ticket)
		}
		err = l.Line("p").Acknowledge(ctx)
		expect.That(t, known(err), "Acknowledge of", s.reply, err)
	})
}
