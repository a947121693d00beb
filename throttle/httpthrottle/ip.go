package httpthrottle

import (
	"net/http"
	"net/netip"
	"slices"
	"strings"
)

// ClientIP returns the address of the client that made a request. This is the connection's address.
// If that belongs to a trusted proxy, it is the last address in X-Forwarded-For that does not.
// Earlier entries are ignored, as the client can invent them.
//
// An IPv6 address is cut to the prefix that a client usually has to itself, such as "2001:db8::/64". A
// connection that has no address, such as a Unix socket, is "local".
func ClientIP(r *http.Request, trusted []netip.Prefix) string {
	ip, ok := parseIP(r.RemoteAddr)
	if !ok {
		return "local"
	}
	hops := strings.Split(strings.Join(r.Header.Values("X-Forwarded-For"), ","), ",")
	isTrusted := func(p netip.Prefix) bool { return p.Contains(ip) }
	for i := len(hops) - 1; i >= 0 && slices.ContainsFunc(trusted, isTrusted); i-- {
		hop, ok := parseIP(strings.TrimSpace(hops[i]))
		if !ok {
			break // the proxy that wrote this is the last address known
		}
		ip = hop
	}
	if ip.Is4() {
		return ip.String()
	}
	return netip.PrefixFrom(ip, 64).Masked().String()
}

func parseIP(s string) (netip.Addr, bool) {
	if withPort, err := netip.ParseAddrPort(s); err == nil {
		return withPort.Addr().Unmap().WithZone(""), true
	}
	ip, err := netip.ParseAddr(strings.Trim(s, "[]"))
	return ip.Unmap().WithZone(""), err == nil
}
