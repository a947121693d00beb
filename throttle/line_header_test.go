package throttle

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
)

// What the header of line.lua says of keys, and that of reserve.lua of fields, words and statuses,
// is what the scripts and Go use.
func TestHeadersOfTheLine(t *testing.T) {
	all := code(lineLua) + code(waitLua) + code(freedLua)
	listed := map[string]bool{}
	for _, line := range regexp.MustCompile(`(?m)^--   ([a-z])(?::[A-Z]+)?  +(.*)$`).FindAllStringSubmatch(header(lineLua), -1) {
		listed[line[1]] = true
	}
	used := map[string]bool{"q": true} // the key that every call is given
	for _, key := range regexp.MustCompile(`P \.\. '([a-z]):?'`).FindAllStringSubmatch(all, -1) {
		used[key[1]] = true
	}
	if !maps.Equal(listed, used) {
		t.Errorf("line.lua lists the keys %q, and uses %q", slices.Sorted(maps.Keys(listed)), slices.Sorted(maps.Keys(used)))
	}

	head := header(reserveLua)
	list := one(t, head, `(?s)4 line: its fields, each on a line: (.*?)\n--       5`)
	list = strings.NewReplacer("\n--", "", "  ", "").Replace(regexp.MustCompile(`\([^)]*\)`).ReplaceAllString(list, ""))
	c := testCall(t)
	if fields, sent := strings.Split(list, ","), strings.Split(c.lineFields("t", 1, planOptions{}), "\n"); len(fields) != len(sent) {
		t.Errorf("the header lists %d fields, Go sends %d", len(fields), len(sent))
	}
	for _, index := range regexp.MustCompile(`line\[(\d+)\]`).FindAllStringSubmatch(code(lineLua), -1) {
		if n, _ := strconv.Atoi(index[1]); n > strings.Count(c.lineFields("t", 1, planOptions{}), "\n")+1 {
			t.Errorf("line.lua reads %s, which Go does not send", index[0])
		}
	}

	words, read := map[string]bool{}, map[string]bool{}
	for _, word := range regexp.MustCompile(`"([a-z]+)"`).FindAllStringSubmatch(one(t, head, `(?s)2 what: (.*?)\n--       3`), -1) {
		words[word[1]] = true
	}
	for _, word := range regexp.MustCompile(`what [=~]= '([a-z]+)'`).FindAllStringSubmatch(code(reserveLua)+all, -1) {
		read[word[1]] = true
	}
	if !maps.Equal(words, read) {
		t.Errorf("the header knows the words %q, the scripts %q", slices.Sorted(maps.Keys(words)), slices.Sorted(maps.Keys(read)))
	}
	if statuses := regexp.MustCompile(`\b\d [a-z]+`).FindAllString(one(t, head, `(?s)reply status: (.*?)\n--       at:`), -1); len(statuses) != statusPlannedBefore+1 {
		t.Errorf("the header lists the statuses %q, Go knows %d", statuses, statusPlannedBefore+1)
	}
}

func testCall(t *testing.T) *call {
	t.Helper()
	c, err := testPlan(t).newCall(Request{Policy: "p", Tenant: "acme", Nonce: "n", Attributes: map[string]string{"user": "bob", "ip": "1", "key": "k", "app": "a"}}, Tenant{})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// Every letter that lead.lua's header explains is sent by Go, and no other.
func TestHeaderOfLead(t *testing.T) {
	text := strings.ReplaceAll(one(t, header(leadLua), `(?s)4\.\. a line behind a letter: (.*?)\n-- reply`), "\n--", "")
	var letters []string
	for _, phrase := range regexp.MustCompile(`(?:^|, )\s*([a-z]) `).FindAllStringSubmatch(text, -1) {
		letters = append(letters, phrase[1])
	}
	slices.Sort(letters)
	server := miniredis.RunT(t)
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer client.Close()
	spied := &spy{}
	client.AddHook(spied)
	l, err := New(Config{Client: client, Policies: []Policy{testPlan(t).Policy}})
	if err != nil {
		t.Fatal(err)
	}
	one := []string{"line"}
	if _, err := l.Lead(t.Context(), "p", time.Second, Leads{Ask: one, Empty: one, Keep: one, Release: one, Tell: one}); err != nil {
		t.Fatal(err)
	}
	var sent []string
	for _, arg := range spied.calls[0][3+1+3:] { // behind the command, its key and three arguments
		sent = append(sent, fmt.Sprint(arg)[:1])
	}
	if slices.Sort(sent); !slices.Equal(letters, sent) {
		t.Errorf("lead.lua explains %q, Go sends %q", letters, sent)
	}
}
