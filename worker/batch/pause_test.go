package batch_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/batch"
)

// A firing that has not begun, as its hours have not, is paused at once: nothing of it is enqueued.
func TestAFiringIsPausedBeforeItsHours(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := fake(t, throttle.Window{Name: "w", Limit: 1, Period: time.Second})
		p := s.scheduler(batch.Batch{Name: "b", Hours: batch.Hours{From: "10:00", To: "11:00"}, Tenants: batch.List("a"), Tasks: calls(1)})
		f, err := p.Fire(t.Context(), "b")
		s.ok(err)
		time.Sleep(3 * time.Second)
		for _, step := range []struct {
			do   func() error
			want batch.State
		}{
			{func() error { return nil }, batch.Waiting},
			{func() error { return p.Pause(t.Context(), f) }, batch.Paused},
			{func() error { return p.Resume(t.Context(), f) }, batch.Waiting},
		} {
			s.ok(step.do())
			if status, err := p.Status(t.Context(), f); err != nil || status.State != step.want {
				t.Errorf("%s, %v, want %s", status.State, err, step.want)
			}
		}
	})
}
