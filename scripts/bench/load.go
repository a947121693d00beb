package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
)

// quiet is the highest load average of a machine that counts as idle.
const quiet = 0.5

// A loadCheck is the flag -force, and the load average at the start.
type loadCheck struct {
	force bool
	found *float64 // nil if this system does not tell
}

func (l *loadCheck) flag(flags *flag.FlagSet) {
	usage := fmt.Sprintf("measure also on a machine that is busy: with a load average above %v", quiet)
	flags.BoolVar(&l.force, "force", false, usage)
}

// check reads the load average, and refuses a machine that is busy.
func (l *loadCheck) check(ctx context.Context, stderr io.Writer) error {
	load, err := loadAverage(ctx)
	if err != nil {
		fmt.Fprintln(stderr, "bench: load average: unknown:", err)
		return nil
	}
	l.found = &load
	fmt.Fprintf(stderr, "bench: load average %.2f\n", load)
	if load > quiet && !l.force {
		return fmt.Errorf("load average %.2f is above %v: "+
			"wait until the machine is quiet, or measure all the same with -force", load, quiet)
	}
	return nil
}

// loadAverage returns the load average of the last minute.
func loadAverage(ctx context.Context) (float64, error) {
	text, err := os.ReadFile("/proc/loadavg") // Linux
	if err != nil {
		if text, err = exec.CommandContext(ctx, "sysctl", "-n", "vm.loadavg").Output(); err != nil { // macOS, the BSDs
			return 0, err
		}
	}
	fields := strings.Fields(strings.Trim(strings.TrimSpace(string(text)), "{}"))
	if len(fields) == 0 {
		return 0, errors.New("the system answers nothing")
	}
	return strconv.ParseFloat(fields[0], 64)
}
