package worker

import (
	"slices"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
)

// The fields that matter here of the protobuf message as which asynq stores a task (its
// internal/proto/asynq.proto).
const (
	fieldType         protowire.Number = 1
	fieldID           protowire.Number = 3
	fieldRetry        protowire.Number = 5
	fieldErrorMsg     protowire.Number = 7
	fieldDeadline     protowire.Number = 9
	fieldUniqueKey    protowire.Number = 10
	fieldLastFailedAt protowire.Number = 11
)

// messageText returns a text field of the message, or "" if it has none.
func messageText(message []byte, field protowire.Number) string {
	text, _ := protowire.ConsumeBytes(messageValue(message, field, protowire.BytesType))
	return string(text)
}

// deadlineOf returns the absolute deadline of the message, or the zero time if it has none.
func deadlineOf(message []byte) time.Time {
	seconds, size := protowire.ConsumeVarint(messageValue(message, fieldDeadline, protowire.VarintType))
	if size < 0 || seconds == 0 {
		return time.Time{}
	}
	return time.Unix(int64(seconds), 0)
}

// messageValue returns the message from the value of its field on, or nothing if it has none.
func messageValue(message []byte, field protowire.Number, of protowire.Type) []byte {
	for len(message) > 0 {
		number, kind, tag := protowire.ConsumeTag(message)
		size := protowire.ConsumeFieldValue(number, kind, message[max(tag, 0):])
		if tag < 0 || size < 0 {
			return nil
		}
		if number == field && kind == of {
			return message[tag:]
		}
		message = message[tag+size:]
	}
	return nil
}

// withError returns a copy of the message whose last error is the reason, which must be valid
// UTF-8, as asynq writes it for an error that is no failure.
func withError(message []byte, reason string, at time.Time) []byte {
	out, ok := without(message, fieldErrorMsg, fieldLastFailedAt)
	if !ok {
		return message
	}
	out = protowire.AppendTag(out, fieldErrorMsg, protowire.BytesType)
	out = protowire.AppendString(out, reason)
	out = protowire.AppendTag(out, fieldLastFailedAt, protowire.VarintType)
	return protowire.AppendVarint(out, uint64(at.Unix()))
}

// without returns a copy of the message without those fields, and false if it cannot be read.
func without(message []byte, fields ...protowire.Number) ([]byte, bool) {
	out := make([]byte, 0, len(message))
	for rest := message; len(rest) > 0; {
		number, _, size := protowire.ConsumeField(rest)
		if size < 0 {
			return nil, false
		}
		if !slices.Contains(fields, number) {
			out = append(out, rest[:size]...)
		}
		rest = rest[size:]
	}
	return out, true
}
