package throttle_test

import (
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/sluice-go/sluice"

// goList returns what go list prints, one field a line.
func goList(t *testing.T, args ...string) []string {
	t.Helper()
	out, err := exec.Command("go", append([]string{"list", "-e"}, args...)...).Output()
	if err != nil {
		if exit, ok := err.(*exec.ExitError); ok {
			t.Fatalf("go list %s: %v\n%s", strings.Join(args, " "), err, exit.Stderr)
		}
		t.Fatal(err)
	}
	return strings.Fields(string(out))
}

// names reports whether an import path has one of the words between its slashes and dots.
func names(path string, words ...string) bool {
	return slices.ContainsFunc(strings.FieldsFunc(path, func(r rune) bool { return r == '/' || r == '.' }), func(part string) bool {
		return slices.Contains(words, part)
	})
}

// What a package must not know of, however far down.
func TestArrowsPointOneWay(t *testing.T) {
	for pkg, words := range map[string][]string{
		"throttle":              {"asynq", "opentelemetry", "prometheus", "worker", "yaml"},
		"throttle/control":      {"asynq", "opentelemetry", "policyfile", "prometheus", "worker", "yaml"},
		"throttle/httpthrottle": {"asynq", "opentelemetry", "policyfile", "prometheus", "worker", "yaml"},
		"throttle/inspect":      {"asynq", "opentelemetry", "policyfile", "prometheus", "worker", "yaml"},
		"throttle/policyfile":   {"asynq", "opentelemetry", "prometheus", "worker"},
		"throttle/promthrottle": {"asynq", "opentelemetry", "policyfile", "worker", "yaml"},
		"throttle/usage":        {"asynq", "opentelemetry", "policyfile", "prometheus", "worker", "yaml"},
		"worker":                {"opentelemetry", "policyfile", "prometheus", "yaml"},
		"worker/batch":          {"opentelemetry", "policyfile", "prometheus", "yaml"},
		"worker/page":           {"opentelemetry", "policyfile", "prometheus", "yaml"},

		"throttle/internal/script": {"asynq", "opentelemetry", "policyfile", "prometheus", "worker", "yaml"},
	} {
		deps := goList(t, "-deps", module+"/"+pkg)
		expect.That(t, slices.Contains(deps, "github.com/redis/go-redis/v9"), pkg, "go list tells no dependencies", deps)
		for _, dep := range deps {
			expect.That(t, !names(dep, words...), "package", pkg, "depends on", dep)
		}
	}
	for pkg, word := range map[string]string{
		"throttle":                    "http",
		"throttle/internal/algorithm": "redis",
		"throttle/internal/glob":      "redis",
		"worker/internal/dispatch":    "hibiken",
		"worker/internal/outage":      "hibiken",
		"internal/apitest":            "throttle",
		"internal/redischeck":         "throttle",
		"internal/servers":            "throttle",
	} {
		for _, path := range goList(t, "-f", `{{join .Imports "\n"}}`, module+"/"+pkg) {
			expect.That(t, !names(path, word), "package", pkg, "imports", path)
		}
	}
}

// YAML has one door, and so have metrics.
func TestSomeModulesHaveOneDoor(t *testing.T) {
	const list = `{{range .Imports}}{{$.ImportPath}}={{.}} {{end}}{{range .TestImports}}{{$.ImportPath}}={{.}} {{end}}{{range .XTestImports}}{{$.ImportPath}}={{.}} {{end}}`
	arrows := goList(t, "-f", list, module+"/...")
	for word, door := range map[string]string{"opentelemetry": "worker/tasktrace", "prometheus": "throttle/promthrottle", "yaml": "throttle/policyfile"} {
		seen := false
		for _, arrow := range arrows {
			from, to, _ := strings.Cut(arrow, "=")
			if from = strings.TrimSuffix(from, "_test"); !names(to, word) {
				continue
			}
			seen = true
			expect.Equal(t, from, module+"/"+door, "imports", to)
		}
		expect.That(t, seen, "no package imports", word, "is the test looking in the wrong place?")
	}
}

// Who calls Redis, passes a client on, or uses its types and errors. docs/architecture.md says which of these call.
func TestOnlyTheseImportTheRedisClient(t *testing.T) {
	importers := strings.Fields(`
		throttle throttle/control throttle/inspect throttle/internal/script throttle/usage
		worker worker/batch worker/internal/asynqredis
		cmd/sluice cmd/sluice/internal/drain cmd/sluice/internal/redisconn cmd/worker-demo
		internal/redischeck
		throttle/internal/limitertest throttle/throttletest worker/internal/sitetest worker/workertest
		internal/hooktest internal/servers internal/testhook`)
	const list = `{{range .Imports}}{{$.ImportPath}}={{.}} {{end}}`
	var found []string
	for _, arrow := range goList(t, "-f", list, module+"/throttle/...", module+"/worker/...", module+"/cmd/...", module+"/internal/...") {
		if from, to, _ := strings.Cut(arrow, "="); to == "github.com/redis/go-redis/v9" {
			found = append(found, strings.TrimPrefix(from, module+"/"))
		}
	}
	slices.Sort(found)
	slices.Sort(importers)
	expect.Equal(t, found, importers)
}

// A worker links the modules that asynq links anyway, and no other.
func TestAWorkerLinksWhatAsynqLinks(t *testing.T) {
	const modules = `{{with .Module}}{{.Path}}{{end}}`
	asynqs := goList(t, "-deps", "-f", modules, "github.com/hibiken/asynq")
	expect.That(t, slices.Contains(asynqs, "github.com/redis/go-redis/v9"), "go list tells no modules of asynq", asynqs)
	for _, pkg := range []string{"throttle", "throttle/control", "throttle/usage", "worker", "worker/batch", "worker/page"} {
		for _, path := range slices.Compact(goList(t, "-deps", "-f", modules, module+"/"+pkg)) {
			expect.That(t, path == module || slices.Contains(asynqs, path), "package", pkg, "links", path)
		}
	}
}
