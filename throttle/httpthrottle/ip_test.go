package httpthrottle_test

import (
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle/httpthrottle"
)

func TestTheClientsAddressIsTakenFromTrustedProxiesOnly(t *testing.T) {
	t.Parallel()
	proxies := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")}
	for _, row := range []struct {
		remote string
		hops   []string
		want   string
	}{
		{"192.0.2.1:80", nil, "192.0.2.1"},
		{"192.0.2.1:80", []string{"203.0.113.9"}, "192.0.2.1"}, // the header of a peer that is not trusted is ignored
		{"10.0.0.1:80", nil, "10.0.0.1"},
		{"10.0.0.1:80", []string{"203.0.113.9"}, "203.0.113.9"},
		{"10.0.0.1:80", []string{"198.51.100.7, 203.0.113.9"}, "203.0.113.9"}, // the first is the client's own word
		{"10.0.0.1:80", []string{"198.51.100.7", "203.0.113.9, 10.2.3.4"}, "203.0.113.9"},
		{"10.0.0.1:80", []string{"203.0.113.9, unknown, 10.2.3.4"}, "10.2.3.4"},
		{"10.0.0.1:80", []string{"203.0.113.9:4711"}, "203.0.113.9"},
		{"10.0.0.1:80", []string{"10.9.9.9"}, "10.9.9.9"},
		{"[::ffff:192.0.2.1]:80", nil, "192.0.2.1"},
		{"[2001:db8:1:2:3:4:5:6%eth0]:80", nil, "2001:db8:1:2::/64"},
		{"[fd00::1]:80", []string{"[2001:db8::7]:99"}, "2001:db8::/64"},
		{"[fd00::1]:80", []string{"[2001:db8::7]"}, "2001:db8::/64"},
		{"@", []string{"203.0.113.9"}, "local"},
	} {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.RemoteAddr, r.Header["X-Forwarded-For"] = row.remote, row.hops
		expect.Equal(t, httpthrottle.ClientIP(r, proxies), row.want, row.remote, "X-Forwarded-For", row.hops)
	}
}
