package worker_test

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// The header of the script lists every key and argument that its code uses, in order, and no
// other.
func TestLuaHeader(t *testing.T) {
	text, err := os.ReadFile("lua/requeue.lua")
	if err != nil {
		t.Fatal(err)
	}
	header, code, ok := strings.Cut(string(text), "\n\n")
	if !ok {
		t.Fatal("no header")
	}
	places := func(text, pattern string) []string {
		var found []string
		for _, match := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
			found = append(found, match[1])
		}
		slices.Sort(found)
		return slices.Compact(found)
	}
	keys, args, ok := strings.Cut(header, "-- ARGV")
	if !ok {
		t.Fatal("no ARGV in the header")
	}
	for name, list := range map[string]string{"KEYS": keys, "ARGV": args} {
		listed, used := places(list, `(?m)^(?:--)?(?: KEYS)?\s+(\d) `), places(code, name+`\[(\d)\]`)
		if len(used) == 0 || !slices.Equal(listed, used) {
			t.Errorf("%s: the header lists %v, the code uses %v", name, listed, used)
		}
	}
}
