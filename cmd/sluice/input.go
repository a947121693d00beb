package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/sluice-go/sluice/cmd/sluice/internal/environ"
	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/policyfile"
	"github.com/sluice-go/sluice/worker/batch"
	"github.com/sluice-go/sluice/worker/batchfile"
)

// loadPolicies returns the policies of a policy file. Its errors are inputErrors.
func (m *Main) loadPolicies(name string) (policies []throttle.Policy, err error) {
	name, data, err := m.readPolicyFile(name)
	if err == nil {
		policies, err = policyfile.Parse(name, data)
	}
	if err != nil {
		return nil, inputError{err}
	}
	return policies, nil
}

// loadBatches returns the policies and batches of a policy file, and its name for messages. Its errors are inputErrors.
func (m *Main) loadBatches(file string) (name string, policies []throttle.Policy, batches []batch.Batch, err error) {
	name, data, err := m.readPolicyFile(file)
	if err == nil {
		policies, batches, err = batchfile.Parse(name, data)
	}
	if err != nil {
		err = inputError{err}
	}
	return name, policies, batches, err
}

// readPolicyFile reads a policy file, or stdin if its name is "-", and replaces references to environment variables,
// except on lines that are a comment. `shown` is the file's name for messages.
func (m *Main) readPolicyFile(name string) (shown string, data []byte, err error) {
	if name == "-" {
		name = "stdin"
		data, err = io.ReadAll(m.Stdin)
	} else {
		data, err = os.ReadFile(name)
	}
	if err != nil {
		return "", nil, fmt.Errorf("policies: %w", err)
	}
	lines := strings.Split(string(data), "\n")
	for i, line := range lines {
		if strings.HasPrefix(strings.TrimSpace(line), "#") {
			continue
		}
		if lines[i], err = environ.Expand(line, m.Env, oneLine); err != nil {
			return "", nil, fmt.Errorf("policies: %s:%d: %w", name, i+1, err)
		}
	}
	return name, []byte(strings.Join(lines, "\n")), nil
}

// oneLine refuses a value that would add lines to a policy file.
func oneLine(value string) error {
	if strings.ContainsAny(value, "\r\n") {
		return errors.New("its value must be one line")
	}
	return nil
}

func (c *RunCommand) readJobs() ([]jobs.Job, error) {
	if c.Jobs == "-" {
		return jobs.Read("stdin", c.Stdin, c.Env)
	}
	file, err := os.Open(c.Jobs)
	if err != nil {
		return nil, fmt.Errorf("--jobs: %w", err)
	}
	defer file.Close()
	return jobs.Read(c.Jobs, file, c.Env)
}

// readHeaders returns the headers that are sent with all calls.
func (c *RunCommand) readHeaders() ([]jobs.Header, error) {
	var headers []jobs.Header
	for _, text := range c.Headers {
		h, err := jobs.ParseHeader(text, c.Env)
		if err != nil {
			return nil, fmt.Errorf("--header: %w", err)
		}
		headers = append(headers, h)
	}
	return headers, nil
}

// jobsName returns a name for the jobs file that no other file gets. The name does not depend on the working directory.
func (c *RunCommand) jobsName() string {
	if c.Jobs == "-" {
		return "stdin"
	}
	abs, _ := filepath.Abs(c.Jobs) // no error: the file was read
	return fmt.Sprintf("%s:%.6x", strings.ToValidUTF8(filepath.Base(abs), "_"), sha256.Sum256([]byte(abs)))
}
