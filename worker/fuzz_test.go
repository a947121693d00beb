package worker_test

import (
	"bytes"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/hibiken/asynq"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/sluice-go/sluice/worker"
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

// Whatever asynq's Redis holds as a task: it is read without harm, and what is written back
// differs in its last error alone.
func FuzzMessage(f *testing.F) {
	whole := message("http:call", "a", "throttled: api")
	for _, seed := range [][]byte{
		nil, {}, whole, whole[:len(whole)-1], whole[1:], append([]byte{0xff}, whole...), []byte("\x0a\x09x"), []byte("\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01x"),
		{0x80}, {0x00}, {0x0b, 0x0c}, {0x0b}, {0x0f}, {0x08, 0x80}, message("\xff\xfe", strings.Repeat("x", 70_000), "\x00"),
	} {
		f.Add(seed, "throttled: api/window, tenant acme, 1.8s")
	}
	f.Fuzz(func(t *testing.T, b []byte, reason string) {
		given := bytes.Clone(b)
		typename, id := worker.MessageText(b, 1), worker.MessageText(b, 3)
		at := time.Unix(1_800_000_000, 0)
		written := worker.WithError(b, reason, at)
		if !bytes.Equal(b, given) {
			t.Fatalf("%q was changed to %q", given, b)
		}
		if bytes.Equal(written, b) && reason != worker.MessageText(b, 7) {
			if protowireValid(b) {
				t.Errorf("%q carries no reason", written)
			}
			return // what is no message stays as it is
		}
		if worker.MessageText(written, 1) != typename || worker.MessageText(written, 3) != id || worker.MessageText(written, 7) != reason {
			t.Errorf("%q became %q", b, written)
		}
		if again := worker.WithError(written, reason, at); !bytes.Equal(again, written) {
			t.Errorf("%q and, written again, %q", written, again)
		}
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

// Whatever somebody wrote into a task's headers: an identity that comes back as it is, or an
// error that asynq can store.
func FuzzHeaders(f *testing.F) {
	for _, seed := range [][3]string{
		{"acme", "user=bob&ip=10.0.0.1", "requests=1&tokens=1500"},
		{"", "", ""},
		{"%zz", "%zz=1", "requests=%zz"},
		{"%2541", "a=%2541", "%2541=1"},
		{"%FF%00", "a=%FF&a=2&=&;", "requests=1;tokens=2"},
		{"\xff", "\xff=\xfe", "\xff=1"},
		{"acme", "user", "requests"},
		{"acme", "", "requests=1.5"}, {"acme", "", "requests=NaN"}, {"acme", "", "requests=-1"}, {"acme", "", "requests=+1"},
		{"acme", "", "requests=9223372036854775808"}, {"acme", "", "requests=1e9"}, {"acme", "", "tokens=1&tokens=2"},
		{strings.Repeat("x", 2000), strings.Repeat("a=b&", 2000), strings.Repeat("&", 2000)},
	} {
		f.Add(seed[0], seed[1], seed[2])
	}
	f.Fuzz(func(t *testing.T, tenant, attributes, cost string) {
		headers := map[string]string{"sluice-tenant": tenant, "sluice-attributes": attributes, "sluice-cost": cost}
		id, err := worker.IdentityOf(asynq.NewTaskWithHeaders("x", nil, headers))
		if err != nil {
			if !utf8.ValidString(err.Error()) || strings.ContainsAny(err.Error(), "\n\x00") || id.Tenant != "" {
				t.Errorf("%q: %+v, %q", headers, id, err)
			}
			return
		}
		again, err := worker.IdentityOf(worker.NewTask(id, "x", nil))
		if err != nil || !sameIdentity(id, again) {
			t.Errorf("%q: %#v comes back as %#v, %v", headers, id, again, err)
		}
	})
}

func sameIdentity(a, b worker.Identity) bool {
	if a.Tenant != b.Tenant || len(a.Attributes) != len(b.Attributes) || len(a.Cost) != len(b.Cost) {
		return false
	}
	for name, value := range a.Attributes {
		if other, ok := b.Attributes[name]; !ok || other != value {
			return false
		}
	}
	for unit, n := range a.Cost {
		if other, ok := b.Cost[unit]; !ok || other != n {
			return false
		}
	}
	return true
}

// Queues and IDs are data too: a ticket names its task, and no other.
func FuzzTicket(f *testing.F) {
	for _, seed := range [][2]string{
		{"default", "a"}, {"a/b", "c"}, {"a", "b/c"}, {"a%2Fb", "c"}, {"{q}", "}:t:x"}, {"\xff\x00", "\n"}, {"", ""}, {"%", "%zz"}, {" ", " "},
		{strings.Repeat("q", 600), strings.Repeat("\xff", 600)},
	} {
		f.Add(seed[0], seed[1])
	}
	f.Fuzz(func(t *testing.T, queue, id string) {
		ticket := worker.TicketOf(queue, id)
		if q, i, ok := worker.TaskOfTicket(ticket); !ok || q != queue || i != id {
			t.Errorf("queue %q, ID %q: ticket %q says %q, %q, %v", queue, id, ticket, q, i, ok)
		}
		worker.TaskOfTicket(id) // whatever somebody takes for a ticket: it does no harm
	})
}
