package script

import (
	"errors"
	"testing"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

// A reply that does not have its shape is an error, and no decision.
func TestAReplyHasItsShape(t *testing.T) {
	p := &Policy{Windows: make([]Window, 1)}
	const ticket = "q/1 00000000000000010 |v key acme 1:"
	for _, c := range []struct {
		take  bool
		reply []any
		good  bool
	}{
		{false, []any{int64(Granted), int64(5), "", int64(1), int64(9)}, true},
		{false, []any{int64(Granted), int64(5), "", int64(1), int64(9), int64(0)}, false}, // a value too many
		{false, []any{int64(Granted), int64(5), `{"fits":[7]}`, int64(1), int64(9)}, true},
		{false, []any{int64(Granted), int64(5), `{"fits":[7,8]}`, int64(1), int64(9)}, false},
		{true, []any{int64(5), int64(9), "id", ticket, int64(4), int64(1)}, true},
		{true, []any{int64(5), int64(9), "id", ticket, int64(4), int64(1), "more"}, false},
		{true, []any{int64(5), int64(9), "id", ticket + " more", int64(4), int64(1)}, false},
		{true, []any{int64(5), int64(9), "id", "q" + ticket[3:], int64(4), int64(1)}, false}, // no ID
		{true, []any{int64(5), int64(9), "id", ticket[:len(ticket)-2] + "2:", int64(4), int64(1)}, false},
	} {
		_, err := p.readAnswers(c.reply, []Request{{Op: Peek}})
		if c.take {
			_, err = p.readTaken(c.reply)
		}
		expect.That(t, (err == nil) == c.good && (c.good || errors.As(err, new(*ReplyError))), c.reply, err)
	}
}
