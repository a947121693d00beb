package worker

import (
	"time"

	"google.golang.org/protobuf/encoding/protowire"
)

// The fields that matter here of the protobuf message as which asynq stores a task (its
// internal/proto/asynq.proto).
const (
	fieldType         protowire.Number = 1
	fieldID           protowire.Number = 3
	fieldErrorMsg     protowire.Number = 7
	fieldLastFailedAt protowire.Number = 11
)

// messageText returns a text field of the message, or "" if it has none.
func messageText(message []byte, field protowire.Number) string {
	for len(message) > 0 {
		number, kind, tag := protowire.ConsumeTag(message)
		size := protowire.ConsumeFieldValue(number, kind, message[max(tag, 0):])
		if tag < 0 || size < 0 {
			return ""
		}
		if number == field && kind == protowire.BytesType {
			text, _ := protowire.ConsumeBytes(message[tag:])
			return string(text)
		}
		message = message[tag+size:]
	}
	return ""
}

// withError returns a copy of the message whose last error is the reason, which must be valid
// UTF-8, as asynq writes it for an error that is no failure.
func withError(message []byte, reason string, at time.Time) []byte {
	out := make([]byte, 0, len(message)+len(reason)+16)
	for rest := message; len(rest) > 0; {
		number, _, size := protowire.ConsumeField(rest)
		if size < 0 {
			return message
		}
		if number != fieldErrorMsg && number != fieldLastFailedAt {
			out = append(out, rest[:size]...)
		}
		rest = rest[size:]
	}
	out = protowire.AppendTag(out, fieldErrorMsg, protowire.BytesType)
	out = protowire.AppendString(out, reason)
	out = protowire.AppendTag(out, fieldLastFailedAt, protowire.VarintType)
	return protowire.AppendVarint(out, uint64(at.Unix()))
}
