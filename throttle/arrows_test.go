package throttle_test

import (
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

const module = "github.com/sluice-go/sluice"

// goList returns what go list prints of packages, one field a line.
func goList(t *testing.T, packages string, options ...string) []string {
	t.Helper()
	list := exec.Command("go", slices.Concat([]string{"list"}, options, strings.Fields(packages))...)
	list.Dir, list.Stderr = "..", os.Stderr
	return strings.Fields(string(expect.Got(list.Output())(t)))
}

// names reports whether an import path has one of the words between its slashes and dots.
func names(path, words string) bool {
	return regexp.MustCompile(`(^|[/.])(` + words + `)([/.]|$)`).MatchString(path)
}

// What packages must not know of, however far down, or must not import.
func TestArrowsPointOneWay(t *testing.T) {
	for packages, words := range map[string]string{
		`./throttle ./throttle/control ./throttle/httpthrottle ./throttle/inspect ./throttle/internal/script
			./throttle/usage`: "asynq|opentelemetry|policyfile|prometheus|worker|yaml",
		"./throttle/policyfile":                 "asynq|opentelemetry|prometheus|worker",
		"./throttle/promthrottle":               "asynq|opentelemetry|policyfile|worker|yaml",
		"./worker ./worker/batch ./worker/page": "opentelemetry|policyfile|prometheus|yaml",
	} {
		for _, dep := range goList(t, packages, "-deps") {
			expect.That(t, !names(dep, words), "one of", packages, "depends on", dep)
		}
	}
	for packages, word := range map[string]string{
		"./internal/apitest ./internal/redischeck ./internal/servers": "throttle",
		"./throttle": "http",
		"./throttle/internal/algorithm ./throttle/internal/glob": "redis",
		"./worker/internal/dispatch ./worker/internal/outage":    "hibiken",
	} {
		for _, path := range goList(t, packages, "-f", `{{join .Imports "\n"}}`) {
			expect.That(t, !names(path, word), "one of", packages, "imports", path)
		}
	}
}

// YAML has one door, and so have metrics and traces, in tests too. Outside tests, only these packages import go-redis: they
// call Redis, pass a client on, or use its types and errors. docs/architecture.md says which of these call.
func TestOnlyTheseImport(t *testing.T) {
	arrows := goList(t, "./...", "-f", `{{range .Imports}}{{$.ImportPath}}={{.}} {{end}}
		{{range .TestImports}}{{$.ImportPath}}_test={{.}} {{end}}{{range .XTestImports}}{{$.ImportPath}}_test={{.}} {{end}}`)
	for word, importers := range map[string]string{
		"go-redis": `cmd/sluice cmd/sluice/internal/drain cmd/sluice/internal/redisconn cmd/worker-demo
			docs/tutorial/step2 docs/tutorial/step3 docs/tutorial/step4
			internal/hooktest internal/redischeck internal/servers internal/testhook scripts/soak
			throttle throttle/control throttle/inspect throttle/internal/limitertest throttle/internal/script
			throttle/throttletest throttle/usage
			worker worker/batch worker/internal/asynqredis worker/internal/sitetest worker/workertest`,
		"opentelemetry": "worker/tasktrace",
		"prometheus":    "throttle/promthrottle",
		"yaml":          "throttle/policyfile",
	} {
		var found []string
		for _, arrow := range arrows {
			from, to, _ := strings.Cut(strings.TrimPrefix(arrow, module+"/"), "=")
			if pkg, isTest := strings.CutSuffix(from, "_test"); names(to, word) && !(isTest && word == "go-redis") {
				found = append(found, pkg)
			}
		}
		expect.Equal(t, slices.Compact(found), strings.Fields(importers), "import", word)
	}
}

// A worker links the modules that asynq links anyway, and no other.
func TestAWorkerLinksWhatAsynqLinks(t *testing.T) {
	const modules = `{{with .Module}}{{.Path}}{{end}}`
	asynqs := goList(t, "github.com/hibiken/asynq", "-deps", "-f", modules)
	const ours = "./throttle ./throttle/control ./throttle/usage ./worker ./worker/batch ./worker/page"
	for _, path := range slices.Compact(goList(t, ours, "-deps", "-f", modules)) {
		expect.That(t, path == module || slices.Contains(asynqs, path), "one of", ours, "links", path)
	}
}

// The files of this package stand in rooms. An arrow is the use of a name, field or method of another room.
func TestRoomsPointDown(t *testing.T) {
	_, text, _ := strings.Cut(string(expect.Got(os.ReadFile("../docs/architecture.md"))(t)), "point down:\n\n```\n")
	text, _, _ = strings.Cut(text, "```")
	rooms := map[string]int{} // of files: from 1, at the top
	for i, line := range strings.Split(text, "\n") {
		_, files, _ := strings.Cut(line, ": ")
		for _, file := range strings.Fields(files) {
			rooms[file+".go"] = i + 1
		}
	}
	exports := map[string]string{}
	for _, export := range goList(t, "./throttle", "-export", "-deps", "-f", "{{.ImportPath}}={{.Export}}") {
		path, file, _ := strings.Cut(export, "=")
		exports[path] = file
	}
	set, uses := token.NewFileSet(), map[*ast.Ident]types.Object{}
	var files []*ast.File
	for _, name := range goList(t, "./throttle", "-f", `{{join .GoFiles " "}}`) {
		expect.That(t, rooms[name] > 0, name, "is in no room of docs/architecture.md")
		files = append(files, expect.Got(parser.ParseFile(set, name, nil, parser.SkipObjectResolution))(t))
	}
	expect.Equal(t, len(rooms), len(files), "files in rooms")
	config := types.Config{Importer: importer.ForCompiler(set, "gc", func(path string) (io.ReadCloser, error) {
		return os.Open(exports[path])
	})}
	pkg := expect.Got(config.Check("throttle", set, files, &types.Info{Uses: uses}))(t)
	arrows, pairs := map[bool]int{}, map[bool]map[string]int{true: {}, false: {}} // by whether they point up
	for use, object := range uses {
		from, to := set.Position(use.Pos()).Filename, set.Position(object.Pos()).Filename
		if up := rooms[from] > rooms[to]; object.Pkg() == pkg && rooms[from] != rooms[to] {
			arrows[up]++
			pairs[up][from+" -> "+to]++
		}
	}
	expect.That(t, 85*arrows[true] < 15*arrows[false], arrows[true], "arrows point up,", arrows[false], "down", pairs[true])
	expect.That(t, 85*len(pairs[true]) < 15*len(pairs[false]), len(pairs[true]), "pairs of files point up,", len(pairs[false]), "down", pairs[true])
}
