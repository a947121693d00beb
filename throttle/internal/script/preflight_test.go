package script

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

// A preflight asks for each command that the scripts call, and those that Go sends beside them.
func TestPreflightKnowsAllCommands(t *testing.T) {
	t.Parallel()
	used := []string{"hlen", "hscan"}
	found := expect.Got(files.ReadDir("lua"))(t)
	calls := regexp.MustCompile(`redis\.p?call\((?:sorted and '(\w+)' or )?'(\w+)'`)
	for _, file := range found {
		for _, call := range calls.FindAllStringSubmatch(File(strings.TrimSuffix(file.Name(), ".lua")), -1) {
			used = append(used, strings.ToLower(call[2]))
			if call[1] != "" {
				used = append(used, strings.ToLower(call[1]))
			}
		}
	}
	var asked []string
	for _, command := range needed {
		name, _, _ := strings.Cut(command.(string), " ")
		asked = append(asked, name)
	}
	slices.Sort(used)
	slices.Sort(asked)
	expect.Equal(t, slices.Compact(asked), slices.Compact(used), "a preflight asks for what the scripts call")
}
