package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/sluice-go/sluice/cmd/sluice/internal/environ"
	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/policyfile"
)

// loadPolicies reads the policies of a policy file. Errors are the user's to correct.
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

// readPolicyFile reads a policy file, or stdin if its name is "-". ${NAME} in it stands for a variable
// of the environment, but not on lines that are a comment.
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
func oneLine(value string) (string, error) {
	if strings.ContainsAny(value, "\r\n") {
		return "", errors.New("its value must be one line")
	}
	return value, nil
}

func (c *RunCommand) readJobs() ([]jobs.Job, error) {
	source := jobs.Source{Dir: ".", Env: c.Env}
	if c.Jobs == "-" {
		return source.Read("stdin", c.Stdin)
	}
	file, err := os.Open(c.Jobs)
	if err != nil {
		return nil, fmt.Errorf("--jobs: %w", err)
	}
	defer file.Close()
	source.Dir = filepath.Dir(c.Jobs)
	return source.Read(c.Jobs, file)
}

// readHeaders reads the headers of all calls.
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

// prefix is what everything of this run in Redis begins with.
func (c *RunCommand) prefix() string {
	if c.Prefix == "" {
		return ""
	}
	return c.Prefix + ":"
}

// queueName names a queue for this jobs file alone, the same from wherever it is run.
func (c *RunCommand) queueName() (string, error) {
	if c.Queue != "" {
		return c.Queue, nil
	}
	if c.Jobs == "-" {
		return "sluice:stdin", nil
	}
	abs, err := filepath.Abs(c.Jobs)
	if err != nil {
		return "", fmt.Errorf("--jobs: %w", err)
	}
	plain := regexp.MustCompile(`[^A-Za-z0-9_.-]`).ReplaceAllString(filepath.Base(abs), "_")
	return fmt.Sprintf("sluice:%s:%.6x", plain, sha256.Sum256([]byte(abs))), nil
}
