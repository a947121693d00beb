package asynqredis_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

// The header of every script lists the keys and arguments that its code uses by number, in order, and the reply.
func TestHeadersOfScriptsSayWhatTheyUse(t *testing.T) {
	files, err := filepath.Glob("lua/*.lua")
	expect.Require(t, err == nil && len(files) != 0, files, err)
	for _, file := range files {
		text := expect.Got(os.ReadFile(file))(t)
		name := filepath.Base(file)
		if name == "functions.lua" {
			continue // functions, with which other scripts begin with
		}
		header, code, ok := strings.Cut(string(text), "\n\n")
		keys, args, hasArgs := strings.Cut(header, "-- ARGV")
		args, _, hasReply := strings.Cut(args, "-- reply")
		if !ok || !hasArgs || !hasReply || !strings.HasPrefix(header, "-- "+name+": ") {
			t.Errorf("%s: the header is to have its name, KEYS, ARGV and reply:\n%s", file, header)
			continue
		}
		for array, list := range map[string]string{"KEYS": keys, "ARGV": args} {
			listed, used := numbers(list, `\s{2,}(\d) `), numbers(code, array+`\[(\d)\]`)
			expect.That(t, slices.Equal(listed, used),
				file, array, ": the header lists", listed, ", the code uses", used)
		}
	}
}

func numbers(text, pattern string) (found []string) {
	for _, match := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
		found = append(found, match[1])
	}
	slices.Sort(found)
	return slices.Compact(found)
}
