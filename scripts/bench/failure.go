package main

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
)

// A failure ends a case at its first error, as t.Fatal ends a test.
type failure struct{ error }

// check ends the case if there is an error.
func check(err error) {
	if err != nil {
		panic(failure{err})
	}
}

// must is check for a call that also returns a value.
func must[T any](v T, err error) T {
	check(err)
	return v
}

func fail(format string, args ...any) { check(fmt.Errorf(format, args...)) }

// guarded returns the error that ended do.
func guarded(do func()) (err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case failure:
			err = r.error
		default:
			panic(r)
		}
	}()
	do()
	return nil
}

// cleanups are functions to call when a case has ended, with or without an error.
type cleanups struct{ all []func() }

func (c *cleanups) cleanup(do func()) { c.all = append(c.all, do) }

// withCleanups calls do with options that have no cleanups yet, and then the cleanups that do has added,
// the last one first. It returns the error that ended do.
func (o scenarioOptions) withCleanups(do func(scenarioOptions)) error {
	o.cleanups = &cleanups{}
	defer func() {
		for _, cleanup := range slices.Backward(o.cleanups.all) {
			cleanup()
		}
	}()
	return guarded(func() { do(o) })
}

// inParallel calls do for 0 to n-1 on several goroutines, and ends the case by the first error of
// each goroutine. After an error no more calls begin.
func inParallel(n, goroutines int, do func(i int)) {
	var next atomic.Int64
	var failed atomic.Bool
	errs := make([]error, goroutines)
	var all sync.WaitGroup
	for g := range goroutines {
		all.Go(func() {
			for i := int(next.Add(1)) - 1; i < n && !failed.Load(); i = int(next.Add(1)) - 1 {
				if errs[g] = guarded(func() { do(i) }); errs[g] != nil {
					failed.Store(true)
				}
			}
		})
	}
	all.Wait()
	check(errors.Join(errs...))
}
