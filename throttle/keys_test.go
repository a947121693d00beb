package throttle

import (
	"fmt"
	"strings"
	"testing"
)

var hostile = []string{
	"acme", "ACME", "a", "{acme}", "}{", "acme}:w:tenant:initech", "a:b", "a,b", ",", ":", "%41", "%", "%%", "A",
	"a\x00b", "a\nb", "\r\n", "\xff\xfe", "é", "ünïcödé", "日本", " ", "*", "?", "[a]", "\\", "\"", "'", "w", "n", "..", "~@-_",
	strings.Repeat("x", MaxValueBytes), strings.Repeat("{", MaxValueBytes), strings.Repeat("\xff", MaxValueBytes),
}

func FuzzEscape(f *testing.F) {
	for i, s := range hostile {
		f.Add(s, hostile[(i+1)%len(hostile)])
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		escaped := escape(a)
		for i := range len(escaped) {
			if c := escaped[i]; !plain(c) && c != '%' {
				t.Errorf("escape(%q) = %q holds the byte %q", a, escaped, c)
			}
		}
		if unescape(escaped) != a {
			t.Errorf("escape(%q) = %q, which says %q", a, escaped, unescape(escaped))
		}
		if (a == b) != (escaped == escape(b)) {
			t.Errorf("%q and %q are both written %q", a, b, escaped)
		}
	})
}

// Keys of different scopes, values, policies and kinds differ, whatever the values are.
func TestKeysNeverCollide(t *testing.T) {
	seen := map[string]string{}
	note := func(key, what string) {
		if other, taken := seen[key]; taken && other != what {
			t.Errorf("%s and %s are both %q", what, other, key)
		}
		seen[key] = what
	}
	scopes := [][]string{{}, {"tenant"}, {"user"}, {"tenant", "user"}, {"n"}, {"w"}}
	for _, policy := range []string{"p", "n"} {
		for _, a := range hostile {
			for _, shared := range []bool{true, false} {
				tag := hashTag(policy, a, shared)
				owner := policy
				if !shared {
					owner = fmt.Sprintf("%s of %q", policy, a)
				}
				for _, b := range hostile[:len(hostile)-3] {
					note(nonceKey(tag, b), fmt.Sprintf("nonce %q, policy %s", b, owner))
					for _, attributes := range scopes {
						values := []string{a, b}[:len(attributes)]
						note(scopeKey(tag, attributes, values), fmt.Sprintf("scope %q = %q, policy %s", attributes, values, owner))
					}
				}
			}
		}
	}
	if len(seen) < 5_000 {
		t.Errorf("only %d keys", len(seen))
	}
}

// slot is what Redis Cluster makes of a key: CRC16 (XMODEM) of what stands in the first braces.
func slot(key string) uint16 {
	if open := strings.IndexByte(key, '{'); open >= 0 {
		if length := strings.IndexByte(key[open+1:], '}'); length > 0 {
			key = key[open+1 : open+1+length]
		}
	}
	crc := uint16(0)
	for i := range len(key) {
		crc ^= uint16(key[i]) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
	}
	return crc % 16384
}

func TestKeysOfOneCallShareASlot(t *testing.T) {
	if got := slot("123456789"); got != 0x31C3 {
		t.Fatalf("slot of the example in the cluster specification: %#x", got)
	}
	own := Policy{Name: "own", Windows: []Window{{Name: "a", Limit: 9, Period: 1e9}, {Name: "b", Limit: 9, Period: 1e9, Per: []string{"user", "tenant"}}}}
	shared := Policy{Name: "shared", Windows: append([]Window{{Name: "c", Limit: 9, Period: 1e9, Per: []string{}}, {Name: "d", Limit: 9, Period: 1e9, Per: []string{"user"}}}, own.Windows...)}
	slots := map[string]map[uint16]bool{"own": {}, "shared": {}}
	for _, p := range []Policy{own, shared} {
		pl, err := newPlan(p)
		if err != nil {
			t.Fatal(err)
		}
		for _, tenant := range hostile {
			for _, other := range hostile {
				c, err := pl.newCall(Request{Policy: p.Name, Tenant: tenant, Nonce: other, Attributes: map[string]string{"user": other}}, Tenant{})
				if err != nil {
					t.Fatal(err)
				}
				if want := len(pl.scopes) + 2; len(c.keys) != want {
					t.Fatalf("%d keys, want %d", len(c.keys), want)
				}
				for _, key := range c.keys {
					slots[p.Name][slot(key)] = true
					if slot(key) != slot(c.keys[0]) {
						t.Errorf("%q and %q are in different slots", key, c.keys[0])
					}
					if strings.Count(key, "{") != 1 || strings.Count(key, "}") != 1 {
						t.Errorf("%q has braces in it", key)
					}
				}
			}
		}
	}
	// Tenants spread over a cluster unless a window is shared between them.
	if len(slots["shared"]) != 1 || len(slots["own"]) < 20 {
		t.Errorf("%d and %d slots", len(slots["shared"]), len(slots["own"]))
	}
}
