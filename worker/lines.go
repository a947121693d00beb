package worker

import (
	"container/heap"
	"context"
	_ "embed"
	"errors"
	"math/rand/v2"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

//go:embed lua/wake.lua
var wakeLua string

const (
	// leaseFor is for how long a worker that leads a line keeps it without a sign of life.
	leaseFor = 3 * time.Second

	// unfitFor is for how long a worker that could not wake a task leads no line.
	unfitFor = 10 * time.Second

	// leadEvery is how often leases are renewed and lines that nobody leads are looked for.
	leadEvery = time.Second

	// leadMost bounds how many lines one call of Lead names.
	leadMost = 500

	// lookMost bounds how many lines are looked at at once.
	lookMost = 8

	// lookTimeout bounds one call to Redis about a line.
	lookTimeout = 5 * time.Second
)

// A task that was called may be on its way to where it can be woken: just denied and not yet
// put down, or just planned and not yet enqueued. So it is called again, after pauses that
// double up to longestPause: for a second in the one case, at most missingTries times in the
// other. Most tasks that are not there were deleted, so meanwhile their room is for the next.
const (
	firstPause   = 10 * time.Millisecond
	longestPause = 100 * time.Millisecond
	activeTries  = 13
	missingTries = 2
)

// ticket names a task in line. The queue is escaped, so that it ends at the first slash.
func (ref taskRef) ticket() string { return url.PathEscape(ref.queue) + "/" + ref.id }

func taskOfTicket(ticket string) (taskRef, bool) {
	queue, id, ok := strings.Cut(ticket, "/")
	name, err := url.PathUnescape(queue)
	return taskRef{name, id}, ok && err == nil
}

// lines wakes the tasks whose turn has come, and sees to it that somebody looks at every line
// at its time. One of all workers leads each line, by a lease in Redis. Who sees a line that another
// leads tells it by that lease, and until that is heard looks by itself when the line is due.
type lines struct {
	leader  bool // not so for clients, which may end at any time
	limiter *throttle.Limiter
	wakes   *redis.Script

	mu     sync.Mutex
	client redis.UniversalClient // of asynq's Redis
	known  map[lineName]*line
	asking bool // some line asks at once
	dues   dueHeap
	failed time.Time     // when this worker could not wake a task last
	nudge  chan struct{} // the loop has something to do before its timer

	ctx  context.Context
	stop context.CancelFunc
	deaf func() // ends listening to the limiter
	busy sync.WaitGroup
}

// A lineName is a policy and, where no window is shared, the tenant whose line it is.
type lineName struct{ policy, tenant string }

type line struct {
	asked  time.Time // when this worker last asked to lead it
	asks   bool      // and will again at the next chance
	due    time.Time // when somebody must look
	empty  bool
	looks  bool      // this worker looks then, also if another leads the line
	lease  time.Time // until when this worker leads it; zero if it does not
	retune bool      // what waits there may wait by other policies
	queued time.Time // its time in the heap, not after due; zero if it is not there
}

type due struct {
	at   time.Time
	name lineName
}

type dueHeap []due

func (h dueHeap) Len() int           { return len(h) }
func (h dueHeap) Less(i, j int) bool { return h[i].at.Before(h[j].at) }
func (h dueHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *dueHeap) Push(x any)        { *h = append(*h, x.(due)) }
func (h *dueHeap) Pop() any {
	last := len(*h) - 1
	d := (*h)[last]
	*h = (*h)[:last]
	return d
}

func newLines(limiter *throttle.Limiter, leader bool) *lines {
	ctx, stop := context.WithCancel(context.Background())
	return &lines{
		ctx:     ctx,
		known:   map[lineName]*line{},
		leader:  leader,
		limiter: limiter,
		nudge:   make(chan struct{}, 1),
		stop:    stop,
		wakes:   redis.NewScript(wakeLua),
	}
}

// use sets the client of asynq's Redis.
func (ls *lines) use(client redis.UniversalClient) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	ls.client = client
}

// start leads lines from now on, until close. Only the first call does anything.
func (ls *lines) start() {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.deaf == nil && ls.ctx.Err() == nil {
		ls.deaf = ls.limiter.OnLine(func(saw throttle.Line) { ls.seen(saw, true) })
		ls.busy.Go(ls.lead)
	}
}

// close gives all lines to other workers, and waits for calls under way.
func (ls *lines) close() {
	ls.end()
	ls.busy.Wait()
}

func (ls *lines) end() {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.deaf != nil {
		ls.deaf()
	}
	ls.stop()
}

// seen is told of every line that a call of the limiter saw; news says that its leader may not
// know of that. It does not block.
func (ls *lines) seen(saw throttle.Line, news bool) {
	name := lineName{saw.Policy, saw.Tenant}
	now := time.Now()
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.ctx.Err() != nil {
		return
	}
	if saw.Policy == "" {
		for name, l := range ls.known {
			if now.Before(l.lease) {
				l.retune = true
				ls.schedule(name, l, now)
			}
		}
		return
	}
	if len(saw.Calls) > 0 {
		ls.busy.Go(func() { ls.wake(name, saw.Calls) })
	}
	l := ls.known[name]
	if l == nil {
		if saw.Due < 0 {
			return
		}
		l = &line{}
		ls.known[name] = l
	}
	l.empty = saw.Due < 0
	switch due := now.Add(saw.Due); {
	case l.empty:
	case now.Before(l.lease):
		ls.schedule(name, l, due)
	case news:
		if saw.Due < 2*leadEvery && !(l.looks && l.due.Before(due)) {
			l.looks = true
			ls.schedule(name, l, due)
		}
		l.asks = true
		if now.Sub(l.asked) > leadEvery {
			l.asked, ls.asking = now, true
			ls.wakeLoop()
		}
	}
}

// schedule is called with mu held.
func (ls *lines) schedule(name lineName, l *line, at time.Time) {
	l.due = at
	if l.queued.IsZero() || at.Before(l.queued) {
		l.queued = at
		heap.Push(&ls.dues, due{at, name})
		if ls.dues[0].name == name {
			ls.wakeLoop()
		}
	}
}

func (ls *lines) wakeLoop() {
	select {
	case ls.nudge <- struct{}{}:
	default:
	}
}

// lead is the loop: it looks at the lines that are due, and renews the leases.
func (ls *lines) lead() {
	nextLead := time.Now()
	if !ls.leader {
		nextLead = nextLead.Add(leadEvery)
	}
	for ls.ctx.Err() == nil {
		if ls.wantsLead() || !time.Now().Before(nextLead) {
			discover := !time.Now().Before(nextLead)
			if discover {
				nextLead = time.Now().Add(leadEvery/2 + rand.N(leadEvery))
			}
			ls.renew(discover)
		}
		ls.look()
		timer := time.NewTimer(ls.sleepFor(nextLead))
		select {
		case <-timer.C:
		case <-ls.nudge:
			timer.Stop()
		case <-ls.ctx.Done():
			timer.Stop()
		}
	}
	ls.release()
}

func (ls *lines) wantsLead() bool {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	asking := ls.asking
	ls.asking = false
	return asking
}

func (ls *lines) sleepFor(nextLead time.Time) time.Duration {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if len(ls.dues) > 0 && ls.dues[0].at.Before(nextLead) {
		nextLead = ls.dues[0].at
	}
	return time.Until(nextLead)
}

// renew tells of lines that were seen; with discover it also keeps the leases, and takes over lines
// that nobody leads.
func (ls *lines) renew(discover bool) {
	for _, policy := range ls.limiter.Policies() {
		leads := ls.leads(policy.Name, discover)
		for {
			batch := leads.cut(leadMost)
			if batch.Take == 0 && batch.none() {
				break
			}
			asked := time.Now()
			ctx, cancel := context.WithTimeout(ls.ctx, lookTimeout)
			led, err := ls.limiter.Lead(ctx, policy.Name, leaseFor, batch.Leads)
			cancel()
			if err != nil {
				break // a lease that runs out is taken over; what matters is logged by the middleware
			}
			ls.kept(policy.Name, batch.Keep, asked)
			ls.granted(policy.Name, led, asked)
			if leads.none() {
				break
			}
		}
	}
}

// leadsOf is a list of names that is sent in batches.
type leadsOf struct{ throttle.Leads }

func (l *leadsOf) none() bool {
	return len(l.Ask)+len(l.Empty)+len(l.Keep)+len(l.Release)+len(l.Tell) == 0
}

func (l *leadsOf) cut(most int) leadsOf {
	take := func(names *[]string) []string {
		n := min(most, len(*names))
		batch := (*names)[:n]
		*names = (*names)[n:]
		most -= n
		return batch
	}
	return leadsOf{throttle.Leads{Keep: take(&l.Keep), Ask: take(&l.Ask), Empty: take(&l.Empty), Release: take(&l.Release), Tell: take(&l.Tell), Take: l.Take}}
}

func (ls *lines) leads(policy string, discover bool) leadsOf {
	now := time.Now()
	var leads leadsOf
	ls.mu.Lock()
	defer ls.mu.Unlock()
	leader := ls.leader && now.Sub(ls.failed) > unfitFor
	if discover && leader {
		leads.Take = leadMost
	}
	for name, l := range ls.known {
		if name.policy != policy {
			continue
		}
		led := now.Before(l.lease)
		switch {
		case led && l.empty && discover:
			leads.Empty = append(leads.Empty, name.tenant)
			delete(ls.known, name)
		case led && discover && leader:
			leads.Keep = append(leads.Keep, name.tenant)
		case led && discover:
			leads.Release = append(leads.Release, name.tenant)
			l.lease = time.Time{}
		case l.asks && leader:
			leads.Ask = append(leads.Ask, name.tenant)
			l.asks = false
		case l.asks:
			leads.Tell = append(leads.Tell, name.tenant)
			l.asks = false
		case !led && !l.looks && now.Sub(l.asked) > time.Minute:
			delete(ls.known, name)
		}
	}
	return leads
}

// kept notes the lines whose lease was renewed.
func (ls *lines) kept(policy string, tenants []string, at time.Time) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	for _, tenant := range tenants {
		if l := ls.known[lineName{policy, tenant}]; l != nil {
			l.lease = at.Add(leaseFor)
		}
	}
}

// granted notes the lines that this worker leads, and has to look at now.
func (ls *lines) granted(policy string, tenants []string, at time.Time) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	for _, tenant := range tenants {
		name := lineName{policy, tenant}
		l := ls.known[name]
		if l == nil {
			l = &line{}
			ls.known[name] = l
		}
		l.retune = l.retune || !at.Before(l.lease)
		l.empty, l.lease = false, at.Add(leaseFor)
		ls.schedule(name, l, at)
	}
}

// look looks at every line that is due and that this worker leads, at a few at once: where every
// tenant has a line, many are due together.
func (ls *lines) look() {
	var looks sync.WaitGroup
	for range lookMost {
		name, retune, ok := ls.takeDue()
		if !ok {
			break
		}
		looks.Go(func() {
			for ; ok; name, retune, ok = ls.takeDue() {
				ls.lookAt(name, retune)
			}
		})
	}
	looks.Wait()
}

func (ls *lines) lookAt(name lineName, retune bool) {
	ctx, cancel := context.WithTimeout(ls.ctx, lookTimeout)
	if retune {
		ls.limiter.Retune(ctx, name.policy, name.tenant) // or each tenant's next call does
	}
	saw, err := ls.limiter.Look(ctx, name.policy, name.tenant)
	cancel()
	switch {
	case err == nil:
		ls.seen(saw, false)
	case ls.ctx.Err() == nil && !errors.Is(err, throttle.ErrUnknownPolicy):
		ls.mu.Lock()
		if l := ls.known[name]; l != nil {
			ls.schedule(name, l, time.Now().Add(leadEvery))
		}
		ls.mu.Unlock()
	}
}

func (ls *lines) takeDue() (name lineName, retune, ok bool) {
	now := time.Now()
	ls.mu.Lock()
	defer ls.mu.Unlock()
	for len(ls.dues) > 0 && !ls.dues[0].at.After(now) {
		d := heap.Pop(&ls.dues).(due)
		l := ls.known[d.name]
		if l == nil || !l.queued.Equal(d.at) {
			continue // it was there again, at a time before this
		}
		l.queued = time.Time{}
		led := now.Before(l.lease)
		switch {
		case l.empty || !led && !l.looks:
		case l.due.After(now):
			ls.schedule(d.name, l, l.due)
		default:
			retune, l.looks, l.retune = l.retune, false, false
			return d.name, retune, true
		}
	}
	return lineName{}, false, false
}

// release leaves the lines to others.
func (ls *lines) release() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ls.ctx), lookTimeout)
	defer cancel()
	names := map[string][]string{}
	ls.mu.Lock()
	for name, l := range ls.known {
		if time.Now().Before(l.lease) {
			names[name.policy] = append(names[name.policy], name.tenant)
		}
	}
	ls.mu.Unlock()
	for policy, tenants := range names {
		for len(tenants) > 0 && ctx.Err() == nil {
			n := min(leadMost, len(tenants))
			ls.limiter.Lead(ctx, policy, leaseFor, throttle.Leads{Release: tenants[:n]}) // or the leases run out
			tenants = tenants[n:]
		}
	}
}

// wake makes tasks whose turn has come the next that asynq picks up. Tasks that are gone leave
// the line, and what they held goes to the next.
func (ls *lines) wake(name lineName, tickets []string) {
	byQueue := map[string][]taskRef{}
	var gone []string
	for _, ticket := range tickets {
		if ref, ok := taskOfTicket(ticket); ok {
			byQueue[ref.queue] = append(byQueue[ref.queue], ref)
		} else {
			gone = append(gone, ticket)
		}
	}
	ls.leave(name, gone)
	for _, refs := range byQueue {
		ls.busy.Go(func() { ls.wakeQueue(name, refs) })
	}
}

func (ls *lines) leave(name lineName, tickets []string) {
	for _, ticket := range tickets {
		ctx, cancel := context.WithTimeout(ls.ctx, lookTimeout)
		ls.limiter.Leave(ctx, name.policy, name.tenant, ticket) // or its hold runs out
		cancel()
	}
}

func (ls *lines) skip(name lineName, ticket string) {
	ctx, cancel := context.WithTimeout(ls.ctx, lookTimeout)
	defer cancel()
	ls.limiter.Skip(ctx, name.policy, name.tenant, ticket) // or its hold runs out
}

// wakeQueue wakes tasks of one queue.
func (ls *lines) wakeQueue(name lineName, refs []taskRef) {
	pause := firstPause
	for try := 0; len(refs) > 0; try++ {
		results, err := ls.wakeOnce(refs)
		if errors.Is(err, redis.ErrClosed) {
			ls.end() // a worker that cannot wake must not lead
		}
		if err != nil {
			ls.mu.Lock()
			ls.failed = time.Now()
			ls.mu.Unlock()
			return // their holds run out, and they are called again
		}
		var again []taskRef
		for i, r := range results {
			switch {
			case r == 3 && try < activeTries:
				again = append(again, refs[i])
			case r == 0 && try < missingTries:
				again = append(again, refs[i])
				if try == 0 {
					ls.skip(name, refs[i].ticket())
				}
			case r == 0:
				ls.leave(name, []string{refs[i].ticket()})
			case r == 4:
				ls.skip(name, refs[i].ticket())
			}
		}
		if refs = again; len(refs) == 0 {
			return
		}
		select {
		case <-time.After(pause):
		case <-ls.ctx.Done():
			return
		}
		pause = min(2*pause, longestPause)
	}
}

func (ls *lines) wakeOnce(refs []taskRef) ([]int64, error) {
	queue := "asynq:{" + refs[0].queue + "}:"
	args := []any{queue + "t:", time.Now().UnixNano()}
	for _, ref := range refs {
		args = append(args, ref.id)
	}
	ls.mu.Lock()
	client := ls.client
	ls.mu.Unlock()
	ctx, cancel := context.WithTimeout(ls.ctx, lookTimeout)
	defer cancel()
	return ls.wakes.Run(ctx, client, []string{queue + "pending", queue + "scheduled", queue + "retry", queue + "sluice:woken", queue + "paused"}, args...).Int64Slice()
}
