package limitertest

import (
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
)

// By MostOver other tests judge a limiter: this one judges MostOver.
func TestTheMostAboveALimitIsFound(t *testing.T) {
	sliding := throttle.Window{Limit: 3, Period: 10 * us}
	fixed := throttle.Window{Algorithm: throttle.AlgorithmFixed, Limit: 3, Period: 10 * us}
	gcra := throttle.Window{Algorithm: throttle.AlgorithmGCRA, Limit: 5, Burst: 3, Period: 10 * us}
	for i, tc := range []struct {
		w    throttle.Window
		log  []LoggedGrant
		want int64
	}{
		{sliding, []LoggedGrant{{1, 3}, {11, 3}}, 0},
		{sliding, []LoggedGrant{{2, 3}, {11, 2}}, 2},
		{sliding, []LoggedGrant{{5, 1}, {6, 1}}, -1},
		{fixed, []LoggedGrant{{9, 3}, {10, 3}}, 0},
		{fixed, []LoggedGrant{{10, 3}, {19, 1}}, 1},
		{gcra, []LoggedGrant{{0, 3}, {2, 1}, {4, 1}}, 0},
		{gcra, []LoggedGrant{{0, 3}, {2, 1}, {3, 1}}, 1},
	} {
		expect.Equal(t, MostOver(tc.w, tc.log), tc.want, i)
	}
}

const (
	us = time.Microsecond
	ms = time.Millisecond
	s  = time.Second
	m  = time.Minute
	h  = time.Hour
)
