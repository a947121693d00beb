package asynqredis_test

import (
	"bytes"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// message is a task as asynq stores it, as far as it matters here.
func message(typename, id, lastErr string) []byte {
	text := func(b []byte, n protowire.Number, s string) []byte {
		return protowire.AppendString(protowire.AppendTag(b, n, protowire.BytesType), s)
	}
	b := text(nil, 1, typename)
	b = text(b, 2, "payload")
	b = text(b, 3, id)
	b = protowire.AppendVarint(protowire.AppendTag(b, 5, protowire.VarintType), 25)
	b = text(b, 7, lastErr)
	return protowire.AppendVarint(protowire.AppendTag(b, 11, protowire.VarintType), 1_800_000_000)
}

// Any bytes that asynq's Redis holds as a task are read without harm, and written back with another last error only.
func FuzzMessage(f *testing.F) {
	whole := message("http:call", "a", "throttled: api")
	for _, seed := range [][]byte{
		nil, {}, whole, whole[:len(whole)-1], whole[1:], append([]byte{0xff}, whole...),
		[]byte("\x0a\x09x"), []byte("\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01x"),
		{0x80}, {0x00}, {0x0b, 0x0c}, {0x0b}, {0x0f}, {0x08, 0x80}, message("\xff\xfe", strings.Repeat("x", 70_000), "\x00"),
	} {
		f.Add(seed, "throttled: api/window, tenant acme, 1.8s")
	}
	f.Fuzz(func(t *testing.T, b []byte, reason string) {
		given := bytes.Clone(b)
		typename, id := asynqredis.Message(b).Type(), asynqredis.Message(b).ID()
		at := time.Unix(1_800_000_000, 0)
		written := asynqredis.Message(b).WithDenial(reason, at)
		expect.Require(t, bytes.Equal(b, given), given, "was changed to", b)
		if bytes.Equal(written, b) && reason != asynqredis.Message(b).LastError() {
			expect.That(t, !protowireValid(b), written, "carries no reason")
			return // what is no message stays as it is
		}
		expect.That(t, written.Type() == typename && written.ID() == id && written.LastError() == reason, b, "became", written)
		again := written.WithDenial(reason, at)
		expect.That(t, bytes.Equal(again, written), written, "and, written again,", again)
	})
}

func protowireValid(b []byte) bool {
	for len(b) > 0 {
		_, _, n := protowire.ConsumeField(b)
		if n < 0 {
			return false
		}
		b = b[n:]
	}
	return true
}

// A task may be denied thousands of times.
func TestMessagesDoNotGrow(t *testing.T) {
	message := asynqredis.Message("\x0a\x01x\x1a\x01a").WithDenial("one", time.Unix(1_800_000_000, 0))
	for range 10 {
		again := message.WithDenial("two", time.Unix(1_800_000_001, 0))
		expect.Require(t, len(again) == len(message) && bytes.Contains(again, []byte("two")), message, "becomes", again)
	}
	refused, size := message, 0
	for i := range int64(10) {
		noted, since := refused.WithRefusal(time.UnixMilli(1_800_000_000_000 + i))
		refused = noted.WithDenial("one", time.Unix(1_800_000_000, 0))
		expect.Require(t, since.UnixMilli() == 1_800_000_000_000 && (i == 0 || len(refused) == size),
			"refused since", since, "in", len(refused), "bytes")
		size = len(refused)
	}
	got, _ := asynqredis.Message("\x0a\x09x").WithRefusal(time.Now())
	expect.That(t, string(got) == "\x0a\x09x", got)
	expect.Equal(t, string(asynqredis.Message("\x0a\x09x").WithDenial("one", time.Now())), "\x0a\x09x")
}

// What is read of a message is what asynq's client has put into it.
func TestAMessageIsReadAsAsynqWroteIt(t *testing.T) {
	s := &taskQueue{TB: t, redis: throttletest.Client(t, throttletest.Miniredis(t).Addr())}
	deadline := time.Now().Add(time.Hour).Truncate(time.Second)
	headers := map[string]string{"a": "1", "": "2", "b": ""}
	task := asynq.NewTaskWithHeaders("the type", []byte("the\x00payload"), headers)
	m := s.capturedTask(task, asynq.TaskID("the ID"), asynq.Timeout(time.Minute), asynq.Deadline(deadline), asynq.Unique(time.Hour)).Message
	if m.ID() != "the ID" || m.Type() != "the type" || string(m.Payload()) != "the\x00payload" || !maps.Equal(m.Headers(), headers) ||
		!m.Deadline().Equal(deadline) || m.UniqueKey() == "" || m.GroupKey() != "" || m.Retried() != 0 || m.LastError() != "" {
		t.Errorf("read %q, %q, %q, %v, %v, %q, %q", m.ID(), m.Type(), m.Payload(), m.Headers(), m.Deadline(), m.UniqueKey(), m.GroupKey())
	}
	for _, row := range []struct {
		now  time.Time
		want time.Duration
	}{{deadline.Add(-time.Hour), time.Minute}, {deadline.Add(-time.Second), time.Second}, {deadline.Add(time.Second), 0}} {
		expect.Equal(t, m.TimeLimit(row.now), row.want, deadline.Sub(row.now), "before the deadline")
	}
}

// Two tasks with one ID are told apart. One task is the same at every attempt.
func TestAJoinKeyTellsTasksOfOneIDApart(t *testing.T) {
	s := &taskQueue{TB: t, redis: throttletest.Client(t, throttletest.Miniredis(t).Addr())}
	key := func(typename, payload string) string {
		return s.capturedTask(asynq.NewTask(typename, []byte(payload)), asynq.TaskID("a")).Message.JoinKey()
	}
	xy, xz, other := key("x", "y"), key("x", "z"), key("xy", "")
	expect.That(t, xy == key("x", "y") && xy != xz && xy != other, "keys", xy, xz, other)
	m := s.capturedTask(asynq.NewTask("x", []byte("y")), asynq.TaskID("a")).Message
	expect.Equal(t, m.WithDenial("throttled", time.Now()).JoinKey(), m.JoinKey(), "the join key after a denial")
	mark := asynqredis.Mark(m.JoinKey(), "call")
	expect.That(t, strings.HasPrefix(mark, m.JoinKey()+"."), "the mark is", mark)
}

// Queues and IDs are data too: a call names its task, and no other.
func FuzzCallOf(f *testing.F) {
	for _, seed := range [][2]string{
		{"default", "a"}, {"a/b", "c"}, {"{q}", "}:t:x"}, {"\xff\x00", "\n"}, {"", ""}, {"a}:t:", "t:"}, {" ", " "},
		{strings.Repeat("q", 600), strings.Repeat("\xff", 600)},
	} {
		f.Add(seed[0], seed[1])
	}
	f.Fuzz(func(t *testing.T, queue, id string) {
		prefix := "asynq:{" + queue + "}:"
		done := []any{"evalsha", "sha", 3, prefix + "active", prefix + "lease", prefix + "t:" + id, id, []byte("task")}
		call := asynqredis.CallOf(done)
		expect.That(t, call.Verb == asynqredis.Done && call.Queue == queue && call.ID == id, queue, id, call)
		message := protowire.AppendString(protowire.AppendTag(nil, 3, protowire.BytesType), id)
		enqueue := []any{"eval", "script", 2, prefix + "t:" + id, prefix + "pending", message, id, int64(1)}
		stores, ok := asynqredis.EnqueueOf(enqueue)
		expect.That(t, ok == (id != "") && (!ok || stores.Queue == queue && stores.ID == id), queue, id, stores)
		done[3], done[5] = done[5], done[3] // as no asynq that is known
		call = asynqredis.CallOf(done)
		expect.That(t, strings.Contains(queue+id, "}:") || call.Verb == asynqredis.Other && call.Queue == queue && call.ID == id, call)
		for n := range done { // other calls do no harm
			asynqredis.CallOf(done[:n])
			asynqredis.EnqueueOf(enqueue[:n])
		}
	})
}

func TestSecondsAreRoundedUp(t *testing.T) {
	second := time.Unix(1_800_000_000, 0)
	for in, want := range map[time.Duration]time.Duration{
		0: 0, 1: time.Second, time.Microsecond: time.Second, 999 * time.Millisecond: time.Second, time.Second: time.Second,
	} {
		got := asynqredis.WholeSecond(second.Add(in))
		expect.That(t, got.Equal(second.Add(want)), in, got.Sub(second), want)
	}
}
