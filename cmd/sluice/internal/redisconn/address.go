package redisconn

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"

	"github.com/redis/go-redis/v9"
)

// An Address is the URL of a Redis, and where it was written, for messages. The kinds are:
//
//	redis://USER:PASSWORD@HOST:PORT/DB                    one server; rediss:// by TLS
//	unix://USER:PASSWORD@/PATH?db=DB                      one server, by a socket
//	redis-sentinel://HOST,HOST/DB?master=NAME             a master that sentinels know
//	redis-cluster://USER:PASSWORD@HOST,HOST               a cluster; also redis:// with several hosts
//
// rediss-sentinel and rediss-cluster use TLS. The USER:PASSWORD of a sentinels' URL are for the sentinels; the Redis
// servers get its parameters username and password. Further parameters are as in redis.ParseURL,
// redis.ParseFailoverURL and redis.ParseClusterURL.
type Address struct {
	Source string // such as "--redis"
	URL    string
}

// split cuts a URL around its hosts: the text before them ends with "://" or "@".
func split(text string) (prefix, hosts, after string, ok bool) {
	scheme, rest, ok := strings.Cut(text, "://")
	if !ok {
		return "", "", "", false
	}
	end := strings.IndexAny(rest, "/?#")
	if end < 0 {
		end = len(rest)
	}
	begin := strings.LastIndex(rest[:end], "@") + 1
	return scheme + "://" + rest[:begin], rest[begin:end], rest[end:], true
}

// errShape replaces the error of net/url, which contains the password.
var errShape = errors.New("is not a URL: must be such as redis://localhost:6379/0, " +
	"with %2F for / and the like in a password")

// Parse returns the options for the URL.
func (a Address) Parse(t TLS) (Opt, error) {
	config, err := t.config()
	if err != nil {
		return Opt{}, err
	}
	connect, err := parse(a.URL, config, t != TLS{})
	if err != nil {
		return Opt{}, fmt.Errorf("%s: %w", a.Source, err)
	}
	return Opt{connect}, nil
}

// parse returns a function that makes clients of the URL. Where that uses TLS, they have the config.
func parse(text string, config *tls.Config, hasFiles bool) (func() redis.UniversalClient, error) {
	prefix, hosts, after, ok := split(text)
	// An @ after the hosts is most likely from a password that contains one of / ? #
	if !ok || strings.ContainsAny(after, "@#") {
		return nil, errShape
	}
	scheme, user, _ := strings.Cut(prefix, "://")
	secure := strings.HasPrefix(scheme, "rediss")
	kind := strings.TrimPrefix(strings.TrimPrefix(scheme, "rediss"), "redis")
	first, more, several := strings.Cut(hosts, ",")
	if several && kind == "" {
		kind = "-cluster"
	}
	plain := "redis://"
	switch {
	case secure:
		plain = "rediss://"
	case kind == "unix":
		plain = "unix://"
	}
	u, err := url.Parse(plain + user + first + after)
	if err != nil {
		return nil, errShape
	}
	if port := map[string]string{"-cluster": "6379", "-sentinel": "26379"}[kind]; port != "" {
		q := u.Query()
		u.Host = withPort(u.Host, port)
		for host := range strings.SplitSeq(more, ",") {
			if host != "" {
				q.Add("addr", withPort(host, port))
			}
		}
		if kind == "-sentinel" && q.Has("master") {
			q.Set("master_name", q.Get("master"))
			q.Del("master")
		}
		u.RawQuery = q.Encode()
	}
	if hasFiles && !secure {
		return nil, errors.New("goes without TLS, but there are TLS files: must begin with rediss")
	}
	// A ServerName is left out, so that a certificate must have the name that is dialled: of several hosts each its own.
	secured := func(parsed *tls.Config) *tls.Config {
		if parsed == nil {
			return nil
		}
		ours := config.Clone()
		ours.InsecureSkipVerify = parsed.InsecureSkipVerify
		return ours
	}
	switch kind {
	case "", "unix":
		o, err := redis.ParseURL(u.String())
		if err != nil {
			return nil, err
		}
		o.TLSConfig = secured(o.TLSConfig)
		return func() redis.UniversalClient { c := *o; return redis.NewClient(&c) }, nil
	case "-cluster":
		o, err := redis.ParseClusterURL(u.String())
		if err != nil {
			return nil, err
		}
		o.TLSConfig = secured(o.TLSConfig)
		return func() redis.UniversalClient { c := *o; return redis.NewClusterClient(&c) }, nil
	case "-sentinel":
		o, err := redis.ParseFailoverURL(u.String())
		if err == nil && o.MasterName == "" {
			err = errors.New("master is missing: must be the name that the sentinels know, such as ?master=mymaster")
		}
		if err != nil {
			return nil, err
		}
		o.TLSConfig = secured(o.TLSConfig)
		return func() redis.UniversalClient { c := *o; return redis.NewFailoverClient(&c) }, nil
	}
	return nil, fmt.Errorf("scheme %q: must be redis, rediss, unix, or redis or rediss with -sentinel or -cluster", scheme)
}

// withPort adds the port to a host that has none.
func withPort(host, port string) string {
	if i := strings.LastIndex(host, ":"); i < 0 || strings.HasSuffix(host, "]") {
		return host + ":" + port
	}
	return host
}

// TLS names PEM files. Without a CA the system's certificates decide whether a server is trusted.
type TLS struct {
	CA   string // certificates of the authorities that may sign the server's
	Cert string // the client's certificate
	Key  string // of Cert
}

func (t TLS) config() (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if t.CA != "" {
		pem, err := os.ReadFile(t.CA)
		if err != nil {
			return nil, fmt.Errorf("--redis-ca: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("--redis-ca %s: holds no certificate: must be a PEM file", t.CA)
		}
	}
	if (t.Cert == "") != (t.Key == "") {
		return nil, errors.New("--redis-cert and --redis-key: one is missing: must be given together")
	}
	if t.Cert != "" {
		pair, err := tls.LoadX509KeyPair(t.Cert, t.Key)
		if err != nil {
			return nil, fmt.Errorf("--redis-cert %s: %w", t.Cert, err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c, nil
}
