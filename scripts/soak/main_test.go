package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/redis/go-redis/v9/logging"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// TestMain is also the worker that a soak starts: this program, with other arguments.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == workerCommand {
		if err := work(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	logging.Disable() // connections break on purpose here
	os.Exit(m.Run())
}

func TestSoakOfASecond(t *testing.T) {
	t.Parallel()
	throttletest.Redis(t) // or it is skipped
	var out, progress bytes.Buffer
	args := []string{"-for", "1s", "-seed", "1", "-fault-rate", "0", "-disrupt-every", "0", "-workers", "2", "-json"}
	code := soak(t.Context(), args, &out, &progress)
	expect.Require(t, code == 0, "exit code", code, &out, &progress)
	var report struct {
		Seed    uint64
		Figures []figure
	}
	expect.Must(t, json.Unmarshal(out.Bytes(), &report))
	got := map[string]figure{}
	for _, f := range report.Figures {
		got[f.Name] = f
	}
	tasks := len(makeJobs(1, time.Second))
	ended := *got["ended well"].Sluice + *got["archived by failures of their own"].Sluice
	expect.That(t, report.Seed == 1 && int(*got["tasks enqueued"].Sluice) == tasks && int(ended) == tasks &&
		*got["runs"].Sluice == *got["runs"].Control, tasks, "tasks", &out)
}
