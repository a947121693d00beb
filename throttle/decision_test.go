package throttle

import (
	"encoding/binary"
	"slices"
	"strings"
	"testing"
	"time"
)

// Whatever a reply holds, it becomes a decision or an error.
func FuzzDecision(f *testing.F) {
	pl, err := newPlan(Policy{Name: "p", Windows: []Window{
		{Name: "s", Limit: 5, Period: time.Minute},
		{Name: "g", Algorithm: GCRA, Limit: 5, Period: time.Minute, Per: []string{}},
	}})
	if err != nil {
		f.Fatal(err)
	}
	bytes := func(reply ...int64) []byte {
		var b []byte
		for _, v := range reply {
			b = binary.BigEndian.AppendUint64(b, uint64(v))
		}
		return b
	}
	const most, least = 1<<63 - 1, -1 << 63
	f.Add(bytes(), false)
	f.Add(bytes(1, 2, 3), false)
	f.Add(bytes(1, 1e15, 1e15, 1, 0, 1e15, 1, 0, 1e15), false)
	f.Add(bytes(0, 1e15, 2e15, 5, 2e15, 2e15, 5, 0, 1e15), true)
	f.Add(bytes(0, least, most, most, most, most, least, least, least), false)
	f.Add(bytes(0, most, least, least, least, least, most, most, most), true)
	f.Fuzz(func(t *testing.T, data []byte, exempt bool) {
		var reply []any
		for chunk := range slices.Chunk(data, 8) {
			if len(chunk) == 8 {
				reply = append(reply, int64(binary.BigEndian.Uint64(chunk)))
			}
		}
		c, err := pl.newCall(Request{Policy: "p", Tenant: "acme", Nonce: "n"}, Tenant{Exempt: exempt})
		if err != nil {
			t.Fatal(err)
		}
		d, _, err := c.decision(reply)
		if (err == nil) != (len(reply) == 9 || len(reply) == 10) { // the tenth is when the line is due
			t.Fatalf("%d values: %v", len(reply), err)
		}
		if err != nil {
			return
		}
		if d.RetryIn < 0 || d.Granted && d.RetryIn != 0 || exempt && !d.Granted || len(d.Windows) != 2 {
			t.Errorf("%+v", d)
		}
		for _, w := range d.Windows {
			if w.Remaining < 0 || w.RetryIn < 0 || d.Granted && w.Denied {
				t.Errorf("%+v", w)
			}
		}
		if reason := d.Reason(); d.Granted != (reason == "") {
			t.Errorf("granted %v, %q", d.Granted, reason)
		}
		d.EarliestReset()
	})
}

func TestReason(t *testing.T) {
	windows := []WindowState{
		{Name: "idle", RetryIn: 9 * time.Hour},
		{Name: "burst", Denied: true, RetryIn: 300 * time.Millisecond},
		{Name: "per-minute", Denied: true, RetryIn: 1771 * time.Millisecond},
	}
	for _, tc := range []struct {
		d    Decision
		want string
	}{
		{Decision{Policy: "github-api", Tenant: "acme", RetryIn: 1771 * time.Millisecond, Windows: windows},
			"throttled: github-api/per-minute, tenant acme, 1.8s"},
		{Decision{Policy: "p", Tenant: "acme\nadmin", RetryIn: time.Microsecond, Windows: windows[1:2]},
			`throttled: p/burst, tenant "acme\nadmin", 1µs`},
		{Decision{Policy: "p", Tenant: strings.Repeat("x", 100), RetryIn: time.Hour + 1, Windows: windows[1:2]},
			"throttled: p/burst, tenant " + strings.Repeat("x", 64) + "..., 1h0m1s"},
		{Decision{Policy: "p", Granted: true, Windows: windows}, ""},
	} {
		if got := tc.d.Reason(); got != tc.want {
			t.Errorf("got  %s\nwant %s", got, tc.want)
		}
	}
	if got := (Decision{RetryIn: time.Second, Windows: windows}).EarliestReset(); got != 300*time.Millisecond {
		t.Errorf("earliest reset %v", got)
	}
}

// A rounded wait is never shorter, and no more than a tenth longer.
func TestRoundUp(t *testing.T) {
	for d := time.Duration(1); d < 1000*time.Hour; d += d/7 + 1 {
		if got := roundUp(d); got < d || d > time.Microsecond && got-d > max(d/10, time.Microsecond) {
			t.Errorf("%v is rounded to %v", d, got)
		}
	}
	for d, want := range map[time.Duration]string{
		0: "0s", 1: "1µs", 9999 * time.Microsecond: "9.999ms", 10001 * time.Microsecond: "11ms",
		1001 * time.Millisecond: "1.1s", 10 * time.Second: "10s", 10001 * time.Millisecond: "11s",
	} {
		if got := roundUp(d).String(); got != want {
			t.Errorf("%v is rounded to %s, want %s", d, got, want)
		}
	}
}
