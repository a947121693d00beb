// Package expect has the checks of tests, of one line each. It imports nothing of Sluice: all tests can use it.
package expect

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
)

// TB has methods of both testing.T and rapid.T.
type TB interface {
	Errorf(format string, args ...any)
	Fatal(args ...any)
	Fatalf(format string, args ...any)
	Helper()
}

// Must ends the test if there is an error.
func Must(t TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// On returns an observer, such as of a limiter, of one type of event.
func On[Event any](observe func(Event)) func(event any) {
	return func(event any) {
		if e, ok := event.(Event); ok {
			observe(e)
		}
	}
}

// ErrOf returns the error of a call that returns something else, too.
func ErrOf(_ any, err error) error { return err }

// Got returns the value of a call, and ends the test if the call failed: expect.Got(l.Reserve(ctx, r))(t).
func Got[V any](v V, err error) func(TB) V {
	return func(t TB) V {
		t.Helper()
		Must(t, err)
		return v
	}
}

// Equal fails the test unless got and want are equal. The message begins with `about`.
func Equal[V any](t TB, got, want V, about ...any) {
	t.Helper()
	g, w := reflect.ValueOf(&got).Elem(), reflect.ValueOf(&want).Elem()
	if g.Kind() == reflect.Slice && g.Len()+w.Len() == 0 || reflect.DeepEqual(got, want) {
		return
	}
	t.Errorf("%s\ngot  %+v\nwant %+v", told(about), got, want)
}

// That fails the test unless the condition is true. The message is made of `about`.
func That(t TB, condition bool, about ...any) {
	t.Helper()
	if !condition {
		t.Errorf("%s", told(about))
	}
}

// Require is That, and ends the test.
func Require(t TB, condition bool, about ...any) {
	t.Helper()
	if !condition {
		t.Fatalf("%s", told(about))
	}
}

// Contains fails the test unless a text has a part.
func Contains(t TB, text, part string, about ...any) {
	t.Helper()
	That(t, strings.Contains(text, part), append(about, fmt.Sprintf("%q is not in", part), text)...)
}

// Err fails the test unless an error matches want: an error, by errors.Is, or a pointer to an error type, by errors.As.
func Err(t TB, err error, want any, about ...any) {
	t.Helper()
	one, ok := want.(error)
	if ok && !errors.Is(err, one) || !ok && !errors.As(err, want) {
		t.Errorf("%s\ngot the error %v, want %T %[3]v", told(about), err, want)
	}
}

// told returns the values as text, with the names of their fields.
func told(about []any) string { return fmt.Sprintf(strings.Repeat("%+v ", len(about)), about...) }
