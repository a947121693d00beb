package worker

import (
	"fmt"
	"log"
	"os"
	"strings"

	"github.com/hibiken/asynq"
)

// exhausted begins what asynq logs before it archives a task. At a denial of a task without retries it
// does so too, although our hook requeues that one in place of its call.
const exhausted = "Retry exhausted for task id="

// A quietLogger leaves out what asynq wrongly says of tasks that were denied.
type quietLogger struct {
	asynq.Logger
	attempts *attempts
}

// Warn logs, unless it is about a denied task.
func (l quietLogger) Warn(args ...any) {
	id, found := strings.CutPrefix(fmt.Sprint(args...), exhausted)
	if !found || !l.attempts.isDenied(id) {
		l.Logger.Warn(args...)
	}
}

// isDenied reports whether the last attempt of a task of that ID, in any queue, ended by a denial.
func (as *attempts) isDenied(id string) bool {
	as.mu.Lock()
	defer as.mu.Unlock()
	for ref, a := range as.byTask {
		if ref.ID == id && a.denied != nil {
			return true
		}
	}
	return false
}

// A plainLogger logs as asynq does that has no Config.Logger.
type plainLogger struct{ *log.Logger }

func newPlainLogger() plainLogger {
	prefix := fmt.Sprintf("asynq: pid=%d ", os.Getpid())
	return plainLogger{log.New(os.Stderr, prefix, log.Ldate|log.Ltime|log.Lmicroseconds|log.LUTC)}
}

func (l plainLogger) Debug(args ...any) { l.Print("DEBUG: ", fmt.Sprint(args...)) }
func (l plainLogger) Info(args ...any)  { l.Print("INFO: ", fmt.Sprint(args...)) }
func (l plainLogger) Warn(args ...any)  { l.Print("WARN: ", fmt.Sprint(args...)) }
func (l plainLogger) Error(args ...any) { l.Print("ERROR: ", fmt.Sprint(args...)) }
func (l plainLogger) Fatal(args ...any) { l.Logger.Fatal("FATAL: ", fmt.Sprint(args...)) }
