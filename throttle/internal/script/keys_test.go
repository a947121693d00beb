package script

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

var hostile = []string{
	"acme", "ACME", "a", "{acme}", "}{", "acme}:w:tenant:initech", "a:b", "a,b", ",", ":", "%41", "%", "%%", "A",
	"a\x00b", "a\nb", "\r\n", "\xff\xfe", "é", "ünïcödé", "日本", " ", "*", "?", "[a]", "\\", "\"", "'", "w", "n", "..", "-", "~@-_",
	strings.Repeat("x", 512), strings.Repeat("{", 512), strings.Repeat("\xff", 512),
}

func FuzzEscape(f *testing.F) {
	for i, s := range hostile {
		f.Add(s, hostile[(i+1)%len(hostile)])
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		escaped := Escape(a)
		expect.Equal(t, regexp.MustCompile(`[^A-Za-z0-9_.~%-]`).FindString(escaped), "", "Escape", a, "=", escaped, "holds")
		expect.Equal(t, Unescape(escaped), a, "Escape", "=", escaped, "which says")
		expect.That(t, (a == b) == (escaped == Escape(b)) && (a == b) == (word(a) == word(b)),
			a, "and", b, "are both written", escaped, "or", word(a))
		expect.That(t, Unescape(word(a)) == a && word(a) != "", "as a word", a, "is", word(a))
		for _, mark := range []string{"", "!", "!abcd"} {
			for _, batch := range []bool{false, true} {
				queue, also, marked, values := ParseFlow(Flow(Escape(a), batch, mark, []string{b, a}))
				expect.That(t, queue == a && also == batch && marked == mark &&
					slices.Equal(values, []string{b, a}),
					"Flow", a, batch, mark, b, "says", marked, values, queue, also)
			}
		}
		queue, id, ok := parseTicket(TicketName(Escape(a), b))
		expect.That(t, ok && queue == a && id == b, "TicketName(", a, b, ") =", TicketName(a, b), "which says", queue, "and", id)
	})
}

// IDs that look like UUIDs come back as they were, and UUIDs are short.
func TestTicketsOfUUIDs(t *testing.T) {
	const id = "01234567-89ab-4cde-8f01-23456789abcd"
	for _, id := range []string{
		id, strings.ToUpper(id), id[:35], id + "0", "x" + id[1:], strings.Replace(id, "-", "a", 1), strings.ReplaceAll(id, "-", ""),
		strings.Repeat("0", 36), "00000000-0000-0000-0000-000000000000", "!ASNFZ4mrTN6PASNFZ4mrzQ", "+" + id[1:],
	} {
		queue, got, ok := parseTicket(TicketName(Escape("my queue"), id))
		expect.That(t, ok && queue == "my queue" && got == id, id, "comes back as", got, queue, ok)
	}
	name := TicketName("q", id)
	expect.That(t, len(name) == 25 && !strings.ContainsAny(name, " \n\t+"), id, "is called", name)
	for _, name := range []string{"q", "q/!", "q/!AAAA", "q/!ASNFZ4mrTN6PASNFZ4mrz?"} {
		_, id, ok := parseTicket(name)
		expect.That(t, !ok, name, "was read as", id)
	}
}

// Keys of different scopes, values, policies and kinds differ, with any values.
func TestKeysNeverCollide(t *testing.T) {
	seen := map[string]string{}
	note := func(key, what string) {
		other, taken := seen[key]
		expect.That(t, !taken || other == what, what, other, "are both", key)
		seen[key] = what
	}
	for _, policy := range []string{"p", "n", "w", "q"} {
		for _, prefix := range []string{"p", "sluice:", "p:sluice:"} {
			note(Prefix(prefix, policy)+"q", "the line of "+policy+" beyond "+prefix)
		}
		p := Prefix("", policy)
		note(p+"q", "the line of "+policy)
		for _, a := range hostile {
			for _, b := range hostile[:len(hostile)-3] {
				for _, attributes := range [][]string{{}, {"tenant"}, {"user"}, {"tenant", "user"}, {"n"}, {"w"}} {
					values := []string{a, b}[:len(attributes)]
					note(p+ScopeKey(attributes, values), fmt.Sprintf("scope %q = %q, policy %s", attributes, values, policy))
				}
			}
		}
	}
	expect.That(t, len(seen) >= 5_000, "only", len(seen), "keys")
	for key := range seen {
		expect.That(t, strings.Count(key, "{") == 1 && strings.Count(key, "}") == 1,
			key, "has braces in it: a cluster would look for it elsewhere")
	}
}
