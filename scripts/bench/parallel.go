package main

import (
	"errors"
	"sync"
	"sync/atomic"
)

// inParallel calls do for 0 to n-1 on several goroutines, and returns the first error of each
// goroutine. After an error no more calls begin.
func inParallel(n, goroutines int, do func(i int) error) error {
	var next atomic.Int64
	var failed atomic.Bool
	errs := make([]error, goroutines)
	var all sync.WaitGroup
	for g := range goroutines {
		all.Go(func() {
			for !failed.Load() {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				if errs[g] = do(i); errs[g] != nil {
					failed.Store(true)
					return
				}
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}
