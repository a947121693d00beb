package scenario

import (
	"sync"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
)

// A DenialReport is a denial in the scenario: the task went back to wait in line, and was taken
// when it fitted. Times are from the begin.
type DenialReport struct {
	Job        string `json:"job"`
	Tenant     string `json:"tenant"`
	Reason     string `json:"reason"` // which asynq's tools show while it waits
	AtMS       int64  `json:"at_ms"`
	ExpectedMS int64  `json:"expected_start_ms"` // by the denial
	TakenMS    int64  `json:"taken_ms"`          // 0 if it never was
	Retried    int    `json:"retried"`           // of its retries: a denial uses none
}

// A denialLog keeps what became of jobs that were denied. It is safe for concurrent use.
type denialLog struct {
	begun time.Time

	mu      sync.Mutex
	denials []*DenialReport
	open    map[string]*DenialReport // those whose job waits, by job
}

func newDenialLog() *denialLog {
	return &denialLog{begun: time.Now(), open: map[string]*DenialReport{}}
}

// decided notes one decision about a job.
func (l *denialLog) decided(job string, d throttle.Decision) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if before := l.open[job]; before != nil {
		before.TakenMS = l.since(d.At)
		delete(l.open, job)
	}
	if d.Granted {
		return
	}
	l.open[job] = &DenialReport{
		Job: job, Tenant: d.Tenant, Reason: d.Reason(), AtMS: l.since(d.At), ExpectedMS: l.since(d.At.Add(d.RetryIn)),
	}
	l.denials = append(l.denials, l.open[job])
}

func (l *denialLog) since(at time.Time) int64 { return max(0, at.Sub(l.begun).Milliseconds()) }

// reports are all denials, in order. The retries are those that asynq has counted by now.
func (l *denialLog) reports(inspector *asynq.Inspector) []DenialReport {
	l.mu.Lock()
	defer l.mu.Unlock()
	reports := make([]DenialReport, len(l.denials))
	for i, denial := range l.denials {
		reports[i] = *denial
		if info, err := inspector.GetTaskInfo(queue, denial.Job); err == nil {
			reports[i].Retried = info.Retried
		}
	}
	return reports
}
