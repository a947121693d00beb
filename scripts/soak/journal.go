package main

import (
	"net"
	"net/rpc"
	"slices"
	"sync"
	"time"
)

// A run is one call of a handler, as the journal saw it.
type run struct {
	Task, Tenant string
	Holder       string    // the worker's process
	Retried      int       // asynq's count at its start
	Granted      time.Time // by the clock of Redis; zero without Sluice, or if the limiter failed open
	Expected     time.Time // by the last denial or the enqueue; zero if it did not wait
	Begun, Ended time.Time // Ended is zero if the end was not reported
	Failed       bool
}

// A journal is the log of runs, outside of Redis. Workers report every start and end. The journal
// answers with the run's verdict.
type journal struct {
	mu       sync.Mutex
	jobs     map[string]job
	runs     []*run
	byTask   map[string][]*run
	expected map[string]time.Time // by task
	denials  int
}

func newJournal(jobs []job) *journal {
	j := &journal{jobs: map[string]job{}, byTask: map[string][]*run{}, expected: map[string]time.Time{}}
	for _, one := range jobs {
		j.jobs[one.ID] = one
	}
	return j
}

// serve answers workers until the listener is closed.
func (j *journal) serve() (net.Listener, error) {
	s := rpc.NewServer()
	if err := s.RegisterName("Journal", &Calls{j}); err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go s.ServeConn(conn)
		}
	}()
	return l, nil
}

// Workers call the methods of Calls. Package rpc wants the type and its methods exported.
type Calls struct{ journal *journal }

// A Verdict is how a run is to go.
type Verdict struct {
	Run   int // its number
	Work  time.Duration
	Fail  bool
	Panic bool
}

// A Started reports that a handler begins.
type Started struct {
	Task, Tenant, Holder string
	Retried              int
	Granted              time.Time
}

// An Ended reports that a handler is about to return.
type Ended struct {
	Run    int
	Failed bool
}

// A Denied reports when a denied task is expected to start.
type Denied struct {
	Task     string
	Expected time.Time
}

// None is no reply.
type None struct{}

// Start notes that a run begins.
func (c *Calls) Start(s Started, v *Verdict) error {
	j := c.journal
	j.mu.Lock()
	defer j.mu.Unlock()
	one := j.jobs[s.Task]
	fails := failures(j.byTask[s.Task]) < one.Fails || one.archives()
	*v = Verdict{Run: len(j.runs), Work: one.Work, Fail: fails, Panic: one.Panics}
	r := &run{
		Task: s.Task, Tenant: s.Tenant, Holder: s.Holder, Retried: s.Retried,
		Granted: s.Granted, Expected: j.expected[s.Task], Begun: time.Now(),
	}
	delete(j.expected, s.Task)
	j.runs = append(j.runs, r)
	j.byTask[s.Task] = append(j.byTask[s.Task], r)
	return nil
}

// End notes that a run ends.
func (c *Calls) End(e Ended, _ *None) error {
	j := c.journal
	j.mu.Lock()
	defer j.mu.Unlock()
	r := j.runs[e.Run]
	r.Ended, r.Failed = time.Now(), e.Failed
	return nil
}

// Deny notes when a task is expected to start.
func (c *Calls) Deny(d Denied, _ *None) error {
	j := c.journal
	j.mu.Lock()
	defer j.mu.Unlock()
	j.denials++
	j.expected[d.Task] = d.Expected
	return nil
}

// begun returns how many runs have begun.
func (j *journal) begun() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.runs)
}

// copied returns all runs as they are now.
func (j *journal) copied() []run {
	j.mu.Lock()
	defer j.mu.Unlock()
	runs := make([]run, len(j.runs))
	for i, r := range j.runs {
		runs[i] = *r
	}
	slices.SortStableFunc(runs, func(a, b run) int { return a.Begun.Compare(b.Begun) })
	return runs
}

func failures(runs []*run) (n int) {
	for _, r := range runs {
		if !r.Ended.IsZero() && r.Failed {
			n++
		}
	}
	return n
}

// joined notes the expected start that the client got at the enqueue.
func (j *journal) joined(task string, at time.Time) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.byTask[task]) == 0 && j.expected[task].IsZero() {
		j.expected[task] = at
	}
}
