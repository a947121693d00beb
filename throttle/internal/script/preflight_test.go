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
	entries := expect.Got(files.ReadDir("lua"))(t)
	calls := regexp.MustCompile(`redis\.p?call\((?:sorted and '(\w+)' or )?'(\w+)'`)
	for _, entry := range entries {
		for _, call := range calls.FindAllStringSubmatch(File(strings.TrimSuffix(entry.Name(), ".lua")), -1) {
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
	if used, asked = slices.Compact(used), slices.Compact(asked); !slices.Equal(used, asked) {
		t.Errorf("the scripts call %q, a preflight asks for %q", used, asked)
	}
}
