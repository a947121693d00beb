package httpthrottle

import (
	"net/http"
	"net/netip"
	"strings"
)

// ClientIP returns the address of who made a request: that of the connection, or, if that is one of the
// trusted proxies, the last in X-Forwarded-For that is not. Of an IPv6 address it returns the first
// bits, 1 to 128, as a prefix such as "2001:db8::/64". A connection that has no address, such as a
// Unix socket, is "local".
//
// Entries before the last proxy that is not trusted are the client's own invention, and not looked at.
func ClientIP(r *http.Request, trusted []netip.Prefix, ipv6Bits int) string {
	ip, ok := parseIP(r.RemoteAddr)
	if !ok {
		return "local"
	}
	hops := strings.Split(strings.Join(r.Header.Values("X-Forwarded-For"), ","), ",")
	for i := len(hops) - 1; i >= 0 && isTrusted(ip, trusted); i-- {
		hop, ok := parseIP(strings.TrimSpace(hops[i]))
		if !ok {
			break // who wrote this is the last of whom anything is known
		}
		ip = hop
	}
	if ip.Is4() {
		return ip.String()
	}
	prefix, err := ip.Prefix(ipv6Bits)
	if err != nil {
		return ip.String()
	}
	return prefix.String()
}

// parseIP reads an address, with or without a port.
func parseIP(s string) (netip.Addr, bool) {
	if withPort, err := netip.ParseAddrPort(s); err == nil {
		return withPort.Addr().Unmap().WithZone(""), true
	}
	ip, err := netip.ParseAddr(strings.Trim(s, "[]"))
	return ip.Unmap().WithZone(""), err == nil
}

func isTrusted(ip netip.Addr, trusted []netip.Prefix) bool {
	for _, p := range trusted {
		if p.Contains(ip) {
			return true
		}
	}
	return false
}
