package docs_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

var (
	code     = regexp.MustCompile("`([^`]+)`")
	path     = regexp.MustCompile(`^[a-z][A-Za-z0-9_./-]*/[A-Za-z0-9_.-]+$`)
	required = regexp.MustCompile(`(?m)^\t(\S+) \S+$`)

	luaFunction = regexp.MustCompile(`(?m)function (?:\w+\.)?(\w+)\(|^\s*(?:\w+\.)?(\w+) = function\(`)
)

// functions returns the names of what a file declares: "f", a method's "T.m", a Lua table's function by its name.
func functions(t *testing.T, name string) (names []string) {
	t.Helper()
	if strings.HasSuffix(name, ".lua") {
		text := expect.Got(os.ReadFile(filepath.Join(root, name)))(t)
		for _, m := range luaFunction.FindAllStringSubmatch(string(text), -1) {
			names = append(names, m[1]+m[2])
		}
		return names
	}
	file := expect.Got(parser.ParseFile(token.NewFileSet(), filepath.Join(root, name), nil, parser.SkipObjectResolution))(t)
	for _, decl := range file.Decls {
		f, ok := decl.(*ast.FuncDecl)
		switch {
		case !ok:
		case f.Recv == nil:
			names = append(names, f.Name.Name)
		default:
			of := f.Recv.List[0].Type
			if star, ok := of.(*ast.StarExpr); ok {
				of = star.X
			}
			if of, ok := of.(*ast.Ident); ok {
				names = append(names, of.Name+"."+f.Name.Name)
			}
		}
	}
	return names
}

// Every file and folder that a page names exists; functions in tables are in their files.
func TestNamedFilesAndFunctionsExist(t *testing.T) {
	pages := files(t, ".md")
	var folders []string
	entries := expect.Got(os.ReadDir(root))(t)
	for _, entry := range entries {
		if entry.IsDir() {
			folders = append(folders, entry.Name())
		}
	}
	steps := 0
	for _, name := range []string{"docs/architecture.md", "docs/contributing.md"} {
		prose, _ := parts(pages[name])
		inSteps := false
		for i, line := range prose {
			cells := strings.Split(line, "|")
			inSteps = len(cells) > 3 && (inSteps || strings.TrimSpace(cells[1]) == "file" && strings.TrimSpace(cells[2]) == "functions")
			for _, m := range code.FindAllStringSubmatch(line, -1) {
				top, _, _ := strings.Cut(m[1], "/")
				if !path.MatchString(m[1]) || !slices.Contains(folders, top) {
					continue // no path, or that of another module
				}
				_, err := os.Stat(filepath.Join(root, m[1]))
				expect.That(t, err == nil, name, i+1, "there is no", m[1])
			}
			if !inSteps || !strings.Contains(cells[1], "`") {
				continue
			}
			file := code.FindStringSubmatch(cells[1])[1]
			if _, err := os.Stat(filepath.Join(root, file)); err != nil {
				continue // it was said above
			}
			declared := functions(t, file)
			for _, m := range code.FindAllStringSubmatch(cells[2], -1) {
				steps++
				expect.That(t, slices.Contains(declared, m[1]), name, i+1, file, "has no function", m[1])
			}
		}
	}
	expect.That(t, steps != 0, steps, "functions are named: is the test looking in the wrong place?")
}

// The table of direct dependencies is that of go.mod.
func TestDependenciesAreListed(t *testing.T) {
	text := expect.Got(os.ReadFile(filepath.Join(root, "go.mod")))(t)
	var needed, listed []string
	for _, m := range required.FindAllStringSubmatch(string(text), -1) { // no "// indirect" behind it
		needed = append(needed, m[1])
	}
	_, table, _ := strings.Cut(files(t, ".md")["docs/architecture.md"], "## Direct dependencies")
	for _, line := range strings.Split(table, "\n") {
		if m := code.FindStringSubmatch(line); m != nil && strings.HasPrefix(line, "| `") {
			listed = append(listed, m[1])
		}
	}
	slices.Sort(needed)
	slices.Sort(listed)
	expect.That(t, len(needed) != 0 && slices.Equal(needed, listed),
		strings.Join(needed, "\n"), strings.Join(listed, "\n"))
}

// A new algorithm is two files, a constant and a line of the registry. So no other product code asks which one it is.
func TestOnlyItsFilesAskForAnAlgorithm(t *testing.T) {
	t.Parallel()
	asks := regexp.MustCompile(`([=!]= |case )(throttle\.)?Algorithm(Sliding|Fixed|GCRA|Calendar|Concurrency)\b|(kind|head, -1\)) [=~]= '|algorithms\['`)
	for _, suffix := range []string{".go", ".lua"} {
		for name, text := range files(t, suffix) {
			helper := strings.HasSuffix(name, "_test.go") || strings.HasPrefix(name, "scripts/") || strings.Contains(name, "/limitertest/")
			if helper || algorithmFiles[strings.TrimSuffix(filepath.Base(name), suffix)] {
				continue
			}
			for i, line := range strings.Split(text, "\n") {
				expect.That(t, !asks.MatchString(line), name, i+1, "asks for one algorithm: make it a trait", strings.TrimSpace(line))
			}
		}
	}
}

var algorithmFiles = map[string]bool{"sliding": true, "fixed": true, "gcra": true, "calendar": true, "concurrency": true}

// A value of an exported type begins with the type's name: throttle.AlgorithmFixed of an Algorithm.
func TestValuesAreNamedAfterTheirType(t *testing.T) {
	t.Parallel()
	value := regexp.MustCompile(`(?m)^(?:\t|const |var )([A-Z]\w*) +(?:= )?([A-Z]\w*)(?: = "|\{\w+\}$)`)
	seen := 0
	for name, text := range files(t, ".go") {
		if strings.HasSuffix(name, "_test.go") || strings.Contains(name, "internal/") {
			continue
		}
		for _, m := range value.FindAllStringSubmatch(text, -1) {
			seen++
			expect.That(t, strings.HasPrefix(m[1], m[2]), name, m[1], "is a", m[2], "begin its name with that")
		}
	}
	expect.That(t, seen >= 30, seen, "values: is the test looking for another notation?")
}

// A walk says how many files its table has, and how many rows come back to a file that stood further up.
func TestWalksAreCounted(t *testing.T) {
	said := regexp.MustCompile(`(\d+) files, (\d+) return`)
	row := regexp.MustCompile("^\\| `([^`]+)` \\|")
	walks := 0
	for _, section := range strings.Split(files(t, ".md")["docs/architecture.md"], "\n### ") {
		m := said.FindStringSubmatch(section)
		if m == nil {
			continue
		}
		walks++
		seen, last, returns := map[string]bool{}, "", 0
		for _, line := range strings.Split(section, "\n") {
			if file := row.FindStringSubmatch(line); file != nil && file[1] != last {
				if last = file[1]; seen[last] {
					returns++
				}
				seen[last] = true
			}
		}
		name, _, _ := strings.Cut(section, "\n")
		expect.Equal(t, fmt.Sprintf("%s: %d files, %d return", name, len(seen), returns), name+": "+m[0])
	}
	expect.Equal(t, walks, 3)
}
