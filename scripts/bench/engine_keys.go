package main

import (
	"context"
	"strconv"

	"github.com/hibiken/asynq"
)

// engineKeys: the keys that each grant adds to those that exist in any case.
func engineKeys(ctx context.Context, o scenarioOptions) ([]figure, error) {
	s, err := newReserveSite(ctx, o, 16)
	if err != nil {
		return nil, err
	}
	defer s.stop()
	reserve, err := ourReserve(s.askers, twoExact()...)
	if err != nil {
		return nil, err
	}
	policy := unbound()
	reserved := func(n int) (int, error) {
		if err := s.clear(ctx); err != nil {
			return 0, err
		}
		if err := inParallel(n, 16, func(i int) error {
			_, err := reserve(ctx, "tenant-"+strconv.Itoa(i%10), 1)
			return err
		}); err != nil {
			return 0, err
		}
		return s.ourKeys(ctx)
	}
	ran := func(n int, drain func(context.Context, crew, []*asynq.Task) (*drained, error)) (int, error) {
		if _, err := drain(ctx, crew{policy: &policy, slots: 32}, tasks(n, 10)); err != nil {
			return 0, err
		}
		return s.ourKeys(ctx)
	}
	const few, many = 200, 1200
	var figures []figure
	for _, way := range []struct {
		name string
		keys func(n int) (int, error)
	}{
		{"reserve", reserved},
		{"task of our client", func(n int) (int, error) { return ran(n, s.drainOurs) }},
		{"task of a plain client", func(n int) (int, error) { return ran(n, s.drainPlain) }},
	} {
		before, err := way.keys(few)
		if err != nil {
			return nil, err
		}
		after, err := way.keys(many)
		if err != nil {
			return nil, err
		}
		o.say("%s: %d keys after %d grants, %d after %d", way.name, before, few, after, many)
		figures = append(figures, figure{Name: "keys a grant, " + way.name, Value: max(0, float64(after-before)/(many-few)), AtMost: new(0.)})
	}
	return figures, nil
}

// ourKeys returns the keys in Redis that are not asynq's.
func (s *site) ourKeys(ctx context.Context) (int, error) {
	keys, err := s.control.Keys(ctx, "*sluice*").Result()
	return len(keys), err
}
