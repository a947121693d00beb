package main

import (
	"context"
	"fmt"
	"time"
)

// A cost is the mean cost of one of many equal things.
type cost struct {
	each float64 // microseconds, of all goroutines together
	cpu  float64 // microseconds of Redis, without idling
}

func (c cost) String() string { return fmt.Sprintf("%.1f us each, %.1f us of Redis", c.each, c.cpu) }

// turns is the number of slices of a side in a round.
const turns = 20

// inTurns has sides act in turn, in short slices, so that a disturbance of the machine hits all of
// them. A side does a part of its things in each slice, and returns how many.
func (s *site) inTurns(ctx context.Context, sides ...func() (int, error)) ([]cost, error) {
	n, took, cpu := make([]int, len(sides)), make([]time.Duration, len(sides)), make([]float64, len(sides))
	for range turns {
		for i, act := range sides {
			t, c, err := s.spent(ctx, func() error {
				did, err := act()
				n[i] += did
				return err
			})
			if err != nil {
				return nil, err
			}
			took[i] += t
			cpu[i] += c
		}
	}
	costs := make([]cost, len(sides))
	for i := range sides {
		costs[i] = cost{took[i].Seconds() * 1e6 / float64(n[i]), cpu[i] / float64(n[i])}
	}
	return costs, nil
}
