package docs_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

var testCommand = regexp.MustCompile(`go test [^|\n]*-run '?([A-Za-z_]+)'? [^|\n]*?(\./[a-z0-9/]+)`)

// A command of a page that runs tests by name finds some: go test passes if it finds none.
func TestNamedCommandsFindTests(t *testing.T) {
	seen := 0
	for name, page := range files(t, ".md") {
		for _, m := range testCommand.FindAllStringSubmatch(page, -1) {
			seen++
			expect.That(t, findsTests(t, m[1], m[2]), name, m[0], "finds no test in", m[2])
		}
	}
	expect.That(t, seen != 0, seen, "commands run tests: is the test looking in the wrong place?")
}

// findsTests reports whether a test or an example of a folder has a name that the pattern matches.
func findsTests(t *testing.T, pattern, folder string) bool {
	t.Helper()
	matches := regexp.MustCompile(`^(Test|Example).*` + pattern + `|^` + pattern)
	paths := expect.Got(filepath.Glob(filepath.Join(root, folder, "*_test.go")))(t)
	for _, path := range paths {
		file := expect.Got(parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution))(t)
		for _, decl := range file.Decls {
			if f, ok := decl.(*ast.FuncDecl); ok && f.Recv == nil && matches.MatchString(f.Name.Name) {
				return true
			}
		}
	}
	return false
}
