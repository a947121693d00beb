package batchfile_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle/policyfile"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/batch"
	"github.com/sluice-go/sluice/worker/batchfile"
)

// describe returns everything that a batch says, and its tasks.
func describe(b batch.Batch) string {
	var text strings.Builder
	fmt.Fprintf(&text, "%s: schedule %q in %q, queue %q, missed %s within %v, hours %+v, finish by %q, late %q, on failed %q, overlap %q, ended %q, options %v\n",
		b.Name, b.Schedule, b.Timezone, b.Queue, b.Missed, b.MissedWithin, b.Hours, b.FinishBy, b.Late, b.OnFailed, b.Overlap, b.Ended, b.Options)
	f := batch.Firing{Batch: b.Name, Tick: time.Date(2026, 1, 2, 2, 0, 0, 0, time.UTC)}
	for tenant, err := range b.Tenants(context.Background(), f) {
		fmt.Fprintf(&text, "  %s %v\n", tenant, err)
		for task, err := range b.Tasks(context.Background(), f, tenant) {
			id, _ := worker.IdentityOf(task)
			fmt.Fprintf(&text, "    %s %s %v %v\n", task.Type(), task.Payload(), id.Cost, err)
		}
	}
	return text.String()
}

func TestGoodFilesAreRead(t *testing.T) {
	files, _ := filepath.Glob("testdata/*.good.yml")
	expect.Require(t, len(files) != 0, "no good files")
	for _, file := range files {
		_, batches, err := batchfile.Load(file)
		expect.Must(t, err)
		got := ""
		for _, b := range batches {
			got += describe(b)
		}
		golden := strings.TrimSuffix(file, ".good.yml") + ".golden"
		want, _ := os.ReadFile(golden)
		expect.That(t, got == string(want), golden, "differs from what was read:", got)
	}
}

// A bad file begins with the messages that it must cause, one a line: "# want: ...".
func TestBadFilesSayWhatIsWrong(t *testing.T) {
	files, _ := filepath.Glob("testdata/*.bad.yml")
	expect.Require(t, len(files) != 0, "no bad files")
	for _, file := range files {
		data := expect.Got(os.ReadFile(file))(t)
		var want []string
		for line := range strings.Lines(string(data)) {
			if message, ok := strings.CutPrefix(strings.TrimSpace(line), "# want: "); ok {
				want = append(want, message)
			}
		}
		_, batches, err := batchfile.Load(file)
		expect.Require(t, err != nil && batches == nil, file, "was read")
		expect.That(t, err.Error() == strings.Join(want, "\n"), "got:", err, "want:", strings.Join(want, "\n"))
		expect.Err(t, err, new(*policyfile.Error))
	}
}
