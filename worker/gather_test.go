package worker

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

// Tasks that come during a commit go with the next one, together. A task whose caller gives up before goes with none.
func TestTasksAreGathered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var commits []int
		open := make(chan struct{})
		g := &gatherer{commit: func(_ context.Context, tasks []*enqueueTask) {
			commits = append(commits, len(tasks))
			<-open
			for _, e := range tasks {
				e.request.Policy = "committed"
			}
		}}
		var callers sync.WaitGroup
		all := make([]enqueueTask, 6)
		impatient, giveUp := context.WithCancel(t.Context())
		for i := range all {
			ctx := t.Context()
			if i == 5 {
				ctx = impatient
			}
			callers.Go(func() { g.do(ctx, &all[i]) })
			synctest.Wait() // the first is under way, alone
		}
		giveUp()
		synctest.Wait()
		expect.Err(t, all[5].Err, context.Canceled, "the caller that gave up got")
		close(open)
		callers.Wait()
		synctest.Wait()
		expect.That(t, len(commits) == 2 && commits[0] == 1 && commits[1] == 4, "commits of", commits, "tasks, want 1 and then 4")
		for i := range 5 {
			expect.That(t, all[i].request.Policy == "committed" && all[i].Err == nil,
				"task", i, all[i].request.Policy, all[i].Err)
		}
		expect.That(t, !g.busy && len(g.waiting) == 0, "it is not at rest")
	})
}

// Callers that come again and again stay together. Else a commit of all but one would alternate with one of that one.
func TestCallersThatComeAgainAreGathered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const callers, rounds = 16, 50
		commits := 0
		g := &gatherer{commit: func(context.Context, []*enqueueTask) {
			commits++
			time.Sleep(time.Millisecond)
		}}
		var all sync.WaitGroup
		for range callers {
			all.Go(func() {
				for range rounds {
					g.do(t.Context(), &enqueueTask{})
				}
			})
		}
		all.Wait()
		if commits > rounds*3/2 { // halfway between one and two a round: large and small ones in turn
			t.Errorf("%d commits for %d tasks each of %d callers", commits, rounds, callers)
		}
	})
}

// A commit that panics holds nobody up, neither those who wait nor those who come later.
func TestACommitThatPanicsHoldsNobodyUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := false
		g := &gatherer{commit: func(context.Context, []*enqueueTask) {
			if begun {
				return
			}
			begun = true
			time.Sleep(time.Second)
			panic("on purpose")
		}}
		var callers sync.WaitGroup
		callers.Go(func() {
			defer func() { _ = recover() }()
			g.do(t.Context(), &enqueueTask{})
		})
		synctest.Wait()
		for range 2 {
			callers.Go(func() { g.do(t.Context(), &enqueueTask{}) })
		}
		callers.Wait()
		g.do(t.Context(), &enqueueTask{})
	})
}
