package call

import "testing"

func TestACodeIsASuccessARetryOrAFailure(t *testing.T) {
	t.Parallel()
	// What becomes of a code: success, retry, or failure at once.
	for _, c := range []struct {
		success, retry string
		want           map[int]string
	}{
		{"", "", map[int]string{
			101: "failure", 200: "success", 304: "success", 404: "failure", 408: "retry",
			425: "retry", 429: "retry", 500: "retry", 599: "retry",
		}},
		{"2xx,404", "", map[int]string{200: "success", 304: "failure", 404: "success", 500: "retry"}},
		{"2xx,503", "", map[int]string{503: "success", 502: "retry"}},
		{"", "409, 500-502", map[int]string{200: "success", 409: "retry", 502: "retry", 503: "failure", 429: "failure"}},
		{"2xx,500", "5xx", map[int]string{500: "success", 501: "retry"}},
		{"", "202", map[int]string{200: "success", 202: "retry"}},
	} {
		o, err := NewOutcome(c.success, c.retry)
		if err != nil {
			t.Errorf("%q, %q: %v", c.success, c.retry, err)
		}
		for code, want := range c.want {
			got := "failure"
			if o.success.Has(code) {
				got = "success"
			} else if o.retry.Has(code) {
				got = "retry"
			}
			if got != want || o.success.Has(code) && o.retry.Has(code) {
				t.Errorf("%q, %q: %d is %s, want %s", c.success, c.retry, code, got, want)
			}
		}
	}
	for _, c := range []struct{ success, retry, want string }{
		{"ok", "", `--success "ok": must be codes from 100 to 599, such as 404, 2xx or 500-503, with commas between them`},
		{"", "2xx,", `--retry "": must be codes from 100 to 599, such as 404, 2xx or 500-503, with commas between them`},
		{"", "6xx", `--retry "6xx": must be codes from 100 to 599, such as 404, 2xx or 500-503, with commas between them`},
		{"", "503-500", `--retry "503-500": must be codes from 100 to 599, such as 404, 2xx or 500-503, with commas between them`},
	} {
		if _, err := NewOutcome(c.success, c.retry); err == nil || err.Error() != c.want {
			t.Errorf("%q, %q: %v, want %s", c.success, c.retry, err, c.want)
		}
	}
}
