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
// rediss-sentinel and rediss-cluster go by TLS. Before sentinels' hosts stand the sentinels' own user and
// password; those of the Redis servers are the parameters username and password. Further parameters
// are those of redis.ParseURL, redis.ParseFailoverURL and redis.ParseClusterURL.
type Address struct {
	Source string // such as "--redis"
	URL    string
}

func wrap(source string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", source, err)
}

// split takes out the hosts: what stands before them ends with "://" or "@".
func split(text string) (before, hosts, after string, ok bool) {
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

// Parse makes the options of the URL.
func (a Address) Parse(t TLS) (Opt, error) {
	before, hosts, after, ok := split(a.URL)
	// An @ behind the hosts is most likely from a password that holds one of / ? #
	if !ok || strings.ContainsAny(after, "@#") {
		return Opt{}, wrap(a.Source, errShape)
	}
	scheme, user, _ := strings.Cut(before, "://")
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
		return Opt{}, wrap(a.Source, errShape)
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
	text := u.String()
	config, err := t.config()
	if err != nil {
		return Opt{}, err
	}
	if config != nil && !secure {
		return Opt{}, fmt.Errorf("%s: goes without TLS, but there are TLS files: must begin with rediss", a.Source)
	}
	// The address that is dialled is the name that a certificate must have.
	secured := func(theirs *tls.Config) *tls.Config {
		if theirs == nil {
			return nil
		}
		ours := &tls.Config{MinVersion: tls.VersionTLS12}
		if config != nil {
			ours = config.Clone()
		}
		ours.InsecureSkipVerify = theirs.InsecureSkipVerify
		return ours
	}
	switch kind {
	case "", "unix":
		o, err := redis.ParseURL(text)
		if err != nil {
			return Opt{}, wrap(a.Source, err)
		}
		o.TLSConfig = secured(o.TLSConfig)
		return Opt{func() redis.UniversalClient { c := *o; return redis.NewClient(&c) }}, nil
	case "-cluster":
		o, err := redis.ParseClusterURL(text)
		if err != nil {
			return Opt{}, wrap(a.Source, err)
		}
		o.TLSConfig = secured(o.TLSConfig)
		return Opt{func() redis.UniversalClient { c := *o; return redis.NewClusterClient(&c) }}, nil
	case "-sentinel":
		o, err := redis.ParseFailoverURL(text)
		if err == nil && o.MasterName == "" {
			err = errors.New("master is missing: must be the name that the sentinels know, such as ?master=mymaster")
		}
		if err != nil {
			return Opt{}, wrap(a.Source, err)
		}
		o.TLSConfig = secured(o.TLSConfig)
		return Opt{func() redis.UniversalClient { c := *o; return redis.NewFailoverClient(&c) }}, nil
	}
	return Opt{}, fmt.Errorf("%s: scheme %q: must be redis, rediss, unix, "+
		"or redis or rediss with -sentinel or -cluster", a.Source, scheme)
}

// withPort adds the port to a host that has none.
func withPort(host, port string) string {
	if i := strings.LastIndex(host, ":"); i < 0 || strings.HasSuffix(host, "]") {
		return host + ":" + port
	}
	return host
}

// TLS names PEM files. All of them may be missing: then the certificates of the system decide.
type TLS struct {
	CA   string // who may have signed the server's certificate
	Cert string // the client's own certificate
	Key  string // and its key
}

// config is nil without files.
func (t TLS) config() (*tls.Config, error) {
	if t == (TLS{}) {
		return nil, nil
	}
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
