package asynqredis

import (
	"fmt"
	"hash/fnv"
	"iter"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
)

// The fields that matter here of asynq's protobuf message of a task (its internal/proto/asynq.proto).
const (
	fieldType         protowire.Number = 1
	fieldPayload      protowire.Number = 2
	fieldID           protowire.Number = 3
	fieldRetry        protowire.Number = 5
	fieldRetried      protowire.Number = 6
	fieldErrorMsg     protowire.Number = 7
	fieldTimeout      protowire.Number = 8
	fieldDeadline     protowire.Number = 9
	fieldUniqueKey    protowire.Number = 10
	fieldLastFailedAt protowire.Number = 11
	fieldGroupKey     protowire.Number = 14
	fieldHeaders      protowire.Number = 15
)

// Our own fields. Asynq skips them when it reads a message, and drops them when it stores the task after a failure.
const (
	fieldDenied       protowire.Number = 1077 // the last error is no failure: see Denied
	fieldHadTurn      protowire.Number = 1078 // see HadTurn
	fieldRefusedSince protowire.Number = 1079 // the first refusal by the upstream, in milliseconds since 1970
)

// A Message is a task as asynq stores it. Fields that cannot be read count as missing.
type Message []byte

func (m Message) ID() string          { return m.text(fieldID) }
func (m Message) Type() string        { return m.text(fieldType) }
func (m Message) LastError() string   { return m.text(fieldErrorMsg) }
func (m Message) UniqueKey() string   { return m.text(fieldUniqueKey) }
func (m Message) GroupKey() string    { return m.text(fieldGroupKey) }
func (m Message) Retried() int64      { return m.number(fieldRetried) }
func (m Message) IsLastAttempt() bool { return m.Retried() >= m.number(fieldRetry) } // no retry is left

// HadTurn reports whether the task has had its turn in line before: it failed, or its server stopped.
func (m Message) HadTurn() bool { return m.Retried() > 0 || m.number(fieldHadTurn) != 0 }

// Denied reports whether the last error is no failure of the task: a denial, or why the task waits in line.
func (m Message) Denied() bool { return m.number(fieldDenied) != 0 }

func (m Message) Payload() []byte {
	return last(m, fieldPayload, protowire.BytesType, protowire.ConsumeBytes)
}

func (m Message) Headers() map[string]string {
	headers := map[string]string{}
	for f := range m.fields() {
		if f.number == fieldHeaders && f.kind == protowire.BytesType {
			entry, _ := protowire.ConsumeBytes(f.value)
			headers[Message(entry).text(1)] = Message(entry).text(2)
		}
	}
	return headers
}

// Deadline returns the task's absolute deadline, or the zero time if it has none.
func (m Message) Deadline() time.Time {
	if seconds := m.number(fieldDeadline); seconds != 0 {
		return time.Unix(seconds, 0)
	}
	return time.Time{}
}

// TimeLimit returns how long asynq would let the task's handler run if it began now.
func (m Message) TimeLimit(now time.Time) time.Duration {
	limit := time.Duration(m.number(fieldTimeout)) * time.Second
	if deadline := m.Deadline(); !deadline.IsZero() && (limit == 0 || deadline.Sub(now) < limit) {
		limit = deadline.Sub(now)
	}
	return max(0, limit)
}

// JoinKey returns 16 bytes that tell the task from others of the same ID: a hash of the task's type and payload.
func (m Message) JoinKey() string {
	hash := fnv.New64a()
	hash.Write([]byte(m.Type()))
	hash.Write([]byte{0})
	hash.Write(m.Payload())
	return fmt.Sprintf("%016x", hash.Sum64())
}

// WithDenial returns a copy of the message that notes a denial. The reason, which must be valid UTF-8, becomes its
// last error, as asynq does with an error that is no failure. A message that cannot be read stays as it is.
func (m Message) WithDenial(reason string, at time.Time) Message {
	m = m.withField(textOf(fieldErrorMsg, reason)).withField(numberOf(fieldLastFailedAt, at.Unix()))
	return m.withField(numberOf(fieldDenied, 1))
}

// WithTurn returns a copy of the message that notes that the task has had its turn.
func (m Message) WithTurn() Message { return m.withField(numberOf(fieldHadTurn, 1)) }

// WithRefusal returns a copy of the message that notes when the upstream first refused a call of the task
// since its last failure. It also returns that time, which is now unless one was noted before.
func (m Message) WithRefusal(now time.Time) (Message, time.Time) {
	if since := m.number(fieldRefusedSince); since != 0 {
		return m, time.UnixMilli(since)
	}
	return m.withField(numberOf(fieldRefusedSince, now.UnixMilli())), now
}

// WithDeadline returns a copy of the message with another deadline. A message that cannot be read stays as it is.
func (m Message) WithDeadline(at time.Time) Message {
	return m.withField(numberOf(fieldDeadline, at.Unix()))
}

func (m Message) text(number protowire.Number) string {
	return last(m, number, protowire.BytesType, protowire.ConsumeString)
}

func (m Message) number(number protowire.Number) int64 {
	return int64(last(m, number, protowire.VarintType, protowire.ConsumeVarint))
}

// last returns the last value of a field, or the zero value if there is none.
func last[T any](m Message, number protowire.Number, kind protowire.Type, read func([]byte) (T, int)) (value T) {
	for f := range m.fields() {
		if f.number == number && f.kind == kind {
			value, _ = read(f.value)
		}
	}
	return value
}

// withField returns a copy of the message with the field set, or the message itself if it cannot be read.
func (m Message) withField(set field) Message {
	out, read := make(Message, 0, len(m)+len(set.whole)), 0
	for f := range m.fields() {
		read += len(f.whole)
		if f.number != set.number {
			out = append(out, f.whole...)
		}
	}
	if read != len(m) {
		return m
	}
	return append(out, set.whole...)
}

type field struct {
	number protowire.Number
	kind   protowire.Type
	value  []byte
	whole  []byte // with its tag
}

func numberOf(number protowire.Number, n int64) field {
	tag := protowire.AppendTag(nil, number, protowire.VarintType)
	return field{number: number, whole: protowire.AppendVarint(tag, uint64(n))}
}

func textOf(number protowire.Number, text string) field {
	tag := protowire.AppendTag(nil, number, protowire.BytesType)
	return field{number: number, whole: protowire.AppendString(tag, text)}
}

// fields yields the fields of a message, until one that cannot be read.
func (m Message) fields() iter.Seq[field] {
	return func(yield func(field) bool) {
		for rest := []byte(m); len(rest) > 0; {
			number, kind, size := protowire.ConsumeField(rest)
			if size < 0 {
				return
			}
			_, _, tag := protowire.ConsumeTag(rest)
			if !yield(field{number, kind, rest[tag:size], rest[:size]}) {
				return
			}
			rest = rest[size:]
		}
	}
}
