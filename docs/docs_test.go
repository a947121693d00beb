// Package docs_test holds the pages to the code: links lead somewhere, snippets are parts of files
// that compile, policies load, and whatever is named exists.
package docs_test

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle/policyfile"
)

const root = ".."

// lineWidth is where prose is wrapped. Tables, code and addresses cannot be.
const lineWidth = 100

// files returns the repository's files whose names end like this, by path from the root.
func files(t *testing.T, suffix string) map[string]string {
	t.Helper()
	found := map[string]string{}
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && entry.Name() == ".git":
			return fs.SkipDir
		case entry.IsDir() || !strings.HasSuffix(path, suffix):
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		found[filepath.ToSlash(name)] = string(text)
		return err
	})
	expect.Must(t, err)
	expect.Require(t, len(found) > 0, "no file ends in", suffix, "is the test looking in the wrong place?")
	return found
}

// A block is one fenced block of a page.
type block struct {
	language string
	line     int
	text     string
}

var fence = regexp.MustCompile("^ *```(.*)$")

// parts returns a page's prose, with its code blanked out line by line, and its code.
func parts(page string) (prose []string, blocks []block) {
	inside := false
	for i, line := range strings.Split(page, "\n") {
		m := fence.FindStringSubmatch(line)
		switch {
		case m != nil && !inside:
			inside = true
			blocks = append(blocks, block{language: m[1], line: i + 1})
		case m != nil:
			inside = false
		case inside:
			blocks[len(blocks)-1].text += line + "\n"
		default:
			prose = append(prose, line)
			continue
		}
		prose = append(prose, "")
	}
	return prose, blocks
}

var (
	heading = regexp.MustCompile(`^#+ +(.*)$`)
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
)

// anchors returns what a page's headings are called in links, as GitHub does.
func anchors(page string) []string {
	var names []string
	prose, _ := parts(page)
	for _, line := range prose {
		if m := heading.FindStringSubmatch(line); m != nil {
			names = append(names, strings.Map(func(r rune) rune {
				switch {
				case r == ' ':
					return '-'
				case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
					return unicode.ToLower(r)
				}
				return -1
			}, m[1]))
		}
	}
	return names
}

func TestLinksLeadSomewhere(t *testing.T) {
	pages := files(t, ".md")
	for name, page := range pages {
		prose, _ := parts(page)
		for i, line := range prose {
			for _, m := range link.FindAllStringSubmatch(line, -1) {
				if strings.Contains(m[1], "://") {
					continue
				}
				path, anchor, _ := strings.Cut(m[1], "#")
				target := name
				if path != "" {
					target = filepath.ToSlash(filepath.Join(filepath.Dir(name), path))
				}
				if _, err := os.Stat(filepath.Join(root, target)); err != nil {
					t.Errorf("%s:%d: %s leads nowhere", name, i+1, m[1])
				} else if anchor != "" && !slices.Contains(anchors(pages[target]), anchor) {
					t.Errorf("%s:%d: %s: %s has no such heading", name, i+1, m[1], target)
				}
			}
		}
	}
}

func TestEveryPageIsListed(t *testing.T) {
	pages := files(t, ".md")
	var linked []string
	for _, m := range link.FindAllStringSubmatch(pages["docs/README.md"], -1) {
		linked = append(linked, filepath.ToSlash(filepath.Join("docs", m[1])))
	}
	for name := range pages {
		expect.That(t, !strings.HasPrefix(name, "docs/") || name == "docs/README.md" || slices.Contains(linked, name),
			"docs/README.md does not link to", name)
	}
}

func TestProseIsWrapped(t *testing.T) {
	for name, page := range files(t, ".md") {
		prose, _ := parts(page)
		for i, line := range prose {
			n := len([]rune(line))
			expect.That(t, n <= lineWidth || strings.HasPrefix(line, "|") || strings.HasPrefix(line, "    "),
				name, i+1, n, "characters: must be at most", lineWidth)
		}
	}
}

// unindented is code without what its place in a file adds to a line: indentation and alignment.
func unindented(code string) string {
	lines := strings.Split(code, "\n")
	for i, line := range lines {
		lines[i] = strings.Join(strings.Fields(line), " ")
	}
	return strings.Join(lines, "\n")
}

// Every Go snippet stands word for word in a file that compiles. A line "// ..." leaves something out.
func TestGoSnippetsCompile(t *testing.T) {
	var sources []string
	for _, text := range files(t, ".go") {
		sources = append(sources, "\n"+unindented(text))
	}
	seen := 0
	for name, page := range files(t, ".md") {
		_, blocks := parts(page)
		for _, b := range blocks {
			if b.language != "go" {
				continue
			}
			seen++
			pieces := strings.Split("\n"+unindented(b.text), "\n// ...")
			expect.That(t, slices.ContainsFunc(sources, func(source string) bool { return containsInOrder(source, pieces) }),
				name, b.line, "no Go file of the repository has this code")
		}
	}
	expect.That(t, seen != 0, "no page has a Go snippet: is the test looking in the wrong place?")
}

func containsInOrder(text string, pieces []string) bool {
	for _, piece := range pieces {
		i := strings.Index(text, piece)
		if i < 0 {
			return false
		}
		text = text[i+len(piece)-1:] // a piece ends in the newline that the next one begins with
	}
	return true
}

func TestPolicySnippetsLoad(t *testing.T) {
	seen := 0
	for name, page := range files(t, ".md") {
		_, blocks := parts(page)
		for _, b := range blocks {
			if b.language != "yaml" || !strings.HasPrefix(b.text, "policies:") {
				continue
			}
			seen++
			expect.Must(t, expect.ErrOf(policyfile.Parse(fmt.Sprintf("%s, the block on line %d", name, b.line), []byte(b.text))))
		}
	}
	expect.That(t, seen != 0, "no page has a policy: is the test looking in the wrong place?")
}

// Where a page says that a test holds something, the test is there.
func TestNamedTestsExist(t *testing.T) {
	var tests strings.Builder
	for _, text := range files(t, "_test.go") {
		tests.WriteString(text)
	}
	named := regexp.MustCompile("`((?:Test|Example|Fuzz|Benchmark)[A-Za-z0-9_]+)`")
	seen := 0
	for name, page := range files(t, ".md") {
		for _, m := range named.FindAllStringSubmatch(page, -1) {
			seen++
			expect.That(t, strings.Contains(tests.String(), "func "+m[1]+"("),
				name, ": there is no test", m[1])
		}
	}
	expect.That(t, seen != 0, "no page names a test: is the test looking in the wrong place?")
}

// Contributing names the file to read first of every package with more than helpers of tests. It begins with a
// test.
func TestEveryPackageHasATestToReadFirst(t *testing.T) {
	t.Parallel()
	_, section, _ := strings.Cut(files(t, "contributing.md")["docs/contributing.md"], "\n## Which test to read first\n")
	section, _, _ = strings.Cut(section, "\n## ")
	tests, listed := files(t, "_test.go"), map[string]bool{}
	for _, m := range regexp.MustCompile("`([^`]+_test.go)`").FindAllStringSubmatch(section, -1) {
		listed[filepath.ToSlash(filepath.Dir(m[1]))] = true
		expect.That(t, strings.Contains(tests[m[1]], "\nfunc Test"), m[1], "has no test")
	}
	for name := range tests {
		folder := filepath.ToSlash(filepath.Dir(name))
		counts := strings.HasPrefix(folder, "throttle") || strings.HasPrefix(folder, "worker") || folder == "cmd/sluice" || folder == "cmd/worker-demo"
		if counts && !listed[folder] {
			t.Errorf("docs/contributing.md does not say which test of %s to read first", folder)
			listed[folder] = true
		}
	}
}

// A block of a page that begins with "$ go run" is what that command prints. All programs are built
// before the first one runs: their output goes by the clock, and linking takes the machine.
func TestProgramsPrintWhatThePageSays(t *testing.T) {
	type shown struct{ where, folder, want string }
	var programs []shown
	for name, page := range files(t, ".md") {
		_, blocks := parts(page)
		for _, b := range blocks {
			command, want, _ := strings.Cut(b.text, "\n")
			folder, ok := strings.CutPrefix(command, "$ go run ./docs/")
			if ok && !strings.Contains(folder, " ") {
				programs = append(programs, shown{fmt.Sprintf("%s:%d", name, b.line), folder, want})
			}
		}
	}
	expect.Require(t, len(programs) > 0, "no page shows what a program prints: is the test looking in the wrong place?")
	dir := t.TempDir()
	build := exec.Command("go", "build", "-ldflags=-s -w", "-o", dir)
	for _, p := range programs {
		build.Args = append(build.Args, "./"+p.folder)
	}
	out, err := build.CombinedOutput()
	expect.Require(t, err == nil, err, out)
	for _, p := range programs {
		t.Run(p.folder, func(t *testing.T) {
			t.Parallel()
			run := exec.Command(filepath.Join(dir, filepath.Base(p.folder)))
			var stderr strings.Builder
			run.Stderr = &stderr
			got, err := run.Output()
			expect.Require(t, err == nil, err, stderr.String())
			expect.That(t, string(got) == p.want, p.where, "differs from what the program says:", string(got))
		})
	}
}

// Fixtures of tests have names of their own, and those that docs/testing.md lists exist. Scripts are not read.
func TestNoTwoFixturesShareAName(t *testing.T) {
	packages := map[string]string{} // by fixture
	for name, text := range files(t, ".go") {
		dir := filepath.ToSlash(filepath.Dir(name))
		if !strings.HasPrefix(name, "scripts/") && (strings.HasSuffix(name, "_test.go") || strings.HasSuffix(dir, "test")) {
			for _, match := range regexp.MustCompile(`(?m)^type (\w+)`).FindAllStringSubmatch(text, -1) {
				other, found := packages[match[1]]
				expect.That(t, !found || other == dir, "both", other, "and", dir, "have a fixture", match[1])
				packages[match[1]] = dir
			}
		}
	}
	_, list, _ := strings.Cut(files(t, "docs/testing.md")["docs/testing.md"], "Fixtures of one package")
	list, _, _ = strings.Cut(list, "\n\n")
	for _, match := range regexp.MustCompile("`(\\w+)`").FindAllStringSubmatch(list, -1) {
		expect.That(t, packages[match[1]] != "", "docs/testing.md: there is no fixture", match[1])
	}
}
