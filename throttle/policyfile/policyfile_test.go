package policyfile_test

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/policyfile"
)

// describe returns all that a file says, but zero values, with a line for each policy, window and tenant.
func describe(policies []throttle.Policy) string {
	var b strings.Builder
	line := func(what string, value any, skip ...string) {
		b.WriteString(what)
		v := reflect.ValueOf(value)
		for i := range v.NumField() {
			if f := v.Type().Field(i); !slices.Contains(skip, f.Name) && !v.Field(i).IsZero() {
				fmt.Fprintf(&b, " %s=%v", f.Name, v.Field(i))
			}
		}
		b.WriteString("\n")
	}
	for _, p := range policies {
		line("policy", p, "Windows", "Tenants")
		for _, w := range p.Windows {
			line("  window", w)
		}
		for _, name := range slices.Sorted(maps.Keys(p.Tenants)) {
			line(fmt.Sprintf("  tenant %q", name), p.Tenants[name], "Windows")
			for _, window := range slices.Sorted(maps.Keys(p.Tenants[name].Windows)) {
				line("    window "+window, p.Tenants[name].Windows[window])
			}
		}
	}
	return b.String()
}

func TestGoodFilesSayWhatTheyMean(t *testing.T) {
	files, _ := filepath.Glob("testdata/*.good.yml")
	expect.Require(t, len(files) > 0, "no good files")
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			policies := expect.Got(policyfile.Load(file))(t)
			usable(t, policies)
			golden := strings.TrimSuffix(file, ".good.yml") + ".golden"
			want, _ := os.ReadFile(golden)
			expect.Equal(t, describe(policies), string(want), golden, "differs from what was read")
		})
	}
}

// usable fails the test unless package throttle accepts the policies, alone and together.
func usable(t *testing.T, policies []throttle.Policy) {
	t.Helper()
	for _, p := range policies {
		expect.Must(t, p.Validate())
	}
	client := redis.NewClient(&redis.Options{}) // never connects: nothing is asked of it
	defer client.Close()
	expect.Must(t, expect.ErrOf(throttle.New(throttle.Config{Client: client, Policies: policies})))
}

// A bad file begins with the messages that it must cause, one a line: "# want: ...".
func TestBadFilesAreRefusedWithTheirLines(t *testing.T) {
	files, _ := filepath.Glob("testdata/*.bad.yml")
	expect.Require(t, len(files) > 0, "no bad files")
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			data := expect.Got(os.ReadFile(file))(t)
			policies, err := policyfile.Parse(filepath.Base(file), data)
			expect.Require(t, err != nil && policies == nil, "read as", describe(policies))
			expect.Equal(t, err.Error(), strings.Join(wants(data), "\n"), err)
			_, ok := errors.AsType[*policyfile.Error](err)
			expect.That(t, ok, err, "is no *policyfile.Error")
		})
	}
}

func wants(data []byte) (messages []string) {
	for line := range strings.Lines(string(data)) {
		message, ok := strings.CutPrefix(strings.TrimSpace(line), "# want: ")
		if !ok {
			break
		}
		messages = append(messages, message)
	}
	return messages
}

var words = regexp.MustCompile(`([a-z])([A-Z])`)

// key returns the key in policy files for a field of package throttle.
func key(field string) string { return strings.ToLower(words.ReplaceAllString(field, "${1}_$2")) }

// Policy files have a key for each field of package throttle.
func TestEveryFieldCanBeWritten(t *testing.T) {
	policies := expect.Got(policyfile.Load("testdata/everything.good.yml"))(t)
	reference := expect.Got(os.ReadFile("../../docs/reference/policies.md"))(t)
	written := map[string]bool{}
	note := func(value any) {
		v := reflect.ValueOf(value)
		for i := range v.NumField() {
			name := v.Type().String() + "." + v.Type().Field(i).Name
			written[name] = written[name] || !v.Field(i).IsZero()
			row := "\n| `" + key(v.Type().Field(i).Name) + "` |"
			expect.Contains(t, string(reference), row, "docs/reference/policies.md has no row for", name)
		}
	}
	for _, p := range policies {
		note(p)
		for _, w := range p.Windows {
			note(w)
		}
		for _, tenant := range p.Tenants {
			note(tenant)
			for _, o := range tenant.Windows {
				note(o)
			}
		}
	}
	for name, ok := range written {
		expect.That(t, ok, "nothing in everything.good.yml sets", name)
	}
}

func TestReferenceExamples(t *testing.T) {
	reference := expect.Got(os.ReadFile("../../docs/reference/policies.md"))(t)
	examples := regexp.MustCompile("(?ms)^```yaml\n(.*?)^```").FindAllSubmatch(reference, -1)
	expect.Require(t, len(examples) > 0, "no examples")
	for i, example := range examples {
		policies, err := policyfile.Parse(fmt.Sprintf("docs/reference/policies.md, example %d", i+1), example[1])
		if err != nil {
			t.Error(err)
			continue
		}
		usable(t, policies)
	}
}

// Each message that the reference shows is caused by some bad file.
func TestReferenceMessages(t *testing.T) {
	reference := expect.Got(os.ReadFile("../../docs/reference/policies.md"))(t)
	place := regexp.MustCompile(`^policyfile: [^ :]+(:\d+)?: `)
	known := map[string]bool{}
	files, _ := filepath.Glob("testdata/*.bad.yml")
	for _, file := range files {
		data := expect.Got(os.ReadFile(file))(t)
		for _, message := range wants(data) {
			known[place.ReplaceAllString(message, "")] = true
		}
	}
	shown := regexp.MustCompile("`(policyfile: [^`]*)`").FindAllStringSubmatch(string(reference), -1)
	expect.Require(t, len(shown) > 0, "no messages")
	for _, message := range shown {
		expect.That(t, known[place.ReplaceAllString(message[1], "")], "no bad file causes", message[1])
	}
}

func TestLoadReportsWhatCannotBeRead(t *testing.T) {
	_, err := policyfile.Load(filepath.Join(t.TempDir(), "none.yml"))
	expect.That(t, errors.Is(err, fs.ErrNotExist) && strings.HasPrefix(err.Error(), "policyfile: "), err)
}

// The bound holds for files without aliases too. For those with aliases: billion-laughs.bad.yml.
func TestValuesAreBounded(t *testing.T) {
	for text, want := range map[string]string{
		"policies: [" + strings.Repeat("1,", 1<<18) + "]": "policyfile: f:1: file is too large: must have at most 262144 values, with every alias written out",
		strings.Repeat("k", 1<<20) + ": 1":                "policyfile: f: file is too large: must have at most 1048576 bytes",
	} {
		_, err := policyfile.Parse("f", []byte(text))
		expect.That(t, err != nil && err.Error() == want, "got:", err, "want:", want)
	}
}

func TestManyErrorsAreCounted(t *testing.T) {
	_, err := policyfile.Parse("f", []byte("policies: ["+strings.Repeat("1,", 25)+"]"))
	lines := strings.Split(err.Error(), "\n")
	expect.That(t, len(lines) == 21 && lines[20] == "policyfile: f: and 5 more", len(lines), "lines, the last", lines[len(lines)-1])
}

func FuzzParse(f *testing.F) {
	files, _ := filepath.Glob("testdata/*.yml")
	for _, file := range files {
		data := expect.Got(os.ReadFile(file))(f)
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		policies, err := policyfile.Parse("f", data)
		if err == nil {
			usable(t, policies)
			return
		}
		expect.That(t, policies == nil, "policies with an error", err)
		for line := range strings.SplitSeq(err.Error(), "\n") {
			expect.That(t, strings.HasPrefix(line, "policyfile: f:"), "a message that is not ours", line)
		}
	})
}

// The files that users begin with load alone and together, and name the source and the date of their figures.
func TestProviderFiles(t *testing.T) {
	const dir = "../../docs/reference/providers/"
	files, _ := filepath.Glob(dir + "*.yml")
	expect.Require(t, len(files) >= 5, len(files), "files in", dir)
	readme := expect.Got(os.ReadFile(dir + "README.md"))(t)
	var all []throttle.Policy
	for _, file := range files {
		policies, err := policyfile.Load(file)
		expect.That(t, err == nil, err)
		all = append(all, policies...)
		text := expect.Got(os.ReadFile(file))(t)
		for _, shape := range []string{`(?m)^# Source: https://\S+$`, `(?m)^# Read:   20\d\d-\d\d-\d\d\b`} {
			expect.That(t, regexp.MustCompile(shape).Match(text), file, "no line matches", shape)
		}
		expect.Contains(t, string(readme), "("+filepath.Base(file)+")", "README.md does not name", file)
	}
	usable(t, all)
}
