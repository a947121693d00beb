package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/servers"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// password has characters that mean something in a URL.
const password = "p@ss/w0rd:?#%"

const passwordInURL = "p%40ss%2Fw0rd%3A%3F%23%25"

// ran holds if two jobs were called, and their windows are in that Redis.
func ran(t *testing.T, d workspace, e runResult, client redis.Cmdable) {
	t.Helper()
	e.want(t, exitDone, "2 jobs: 2 succeeded")
	keys, err := client.Keys(t.Context(), "sluice:{api}:*").Result()
	that(t, err == nil && len(keys) > 0, "keys in Redis", keys, err)
	equal(t, len(d.results("out.jsonl")), 2, "results", d.read("out.jsonl"))
	that(t, !strings.Contains(e.stderr, "w0rd"), "the password is told", e.stderr)
}

func TestRedisIsReachedAsAUser(t *testing.T) {
	t.Parallel()
	r := newRemote(t)
	addr := throttletest.Redis(t, "--user", "alice", "on", ">"+password, "~*", "&*", "+@all", "--user", "default", "off")
	admin := redis.NewClient(&redis.Options{Addr: addr, Username: "alice", Password: password, DB: 3})
	defer admin.Close()
	for _, c := range []struct {
		name string
		env  []string
		args []string
	}{
		{"in the URL", nil, []string{"--redis", "redis://alice:" + passwordInURL + "@" + addr + "/3"}},
		{"SLUICE_REDIS_URL", []string{"SLUICE_REDIS_URL", "redis://alice:" + passwordInURL + "@" + addr + "/3"}, nil},
		{"a file", nil, []string{"--redis-file", "FILE"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			admin.FlushAll(t.Context())
			d := newWorkspace(t, roomy, manyJobs(2, r.URL, ""))
			d.write("url", "redis://alice:"+passwordInURL+"@"+addr+"/3\n")
			for i := range c.args {
				c.args[i] = strings.Replace(c.args[i], "FILE", d.path("url"), 1)
			}
			ran(t, d, runWith(t.Context(), c.env, d.args(c.args...)...), admin)
		})
	}
	d := newWorkspace(t, roomy, manyJobs(2, r.URL, ""))
	for url, want := range map[string]string{
		"redis://alice:wr0ng@" + addr:            "--redis: WRONGPASS ",
		"redis://:" + passwordInURL + "@" + addr: "--redis: WRONGPASS ",
		"redis://alice:" + password + "@" + addr: "--redis: is not a URL: ",
		"redis://alice:w0rd@" + addr + "/one":    `--redis: redis: invalid database number: "one"`,
		"redis://alice:w0rd@" + addr + "?x=1":    "--redis: redis: unexpected option: x",
	} {
		e := runMain(t.Context(), "", d.args("--redis", url)...).want(t, exitBadInput, want)
		that(t, !strings.Contains(e.stderr, "w0rd") && !strings.Contains(e.stderr, "wr0ng"),
			url, "the password is told", e.stderr)
	}
	e := runWith(t.Context(), []string{"SLUICE_REDIS_URL", "redis://alice:w0rd@" + addr}, "run", "-h")
	that(t, !strings.Contains(e.stdout+e.stderr, "w0rd"), "the help tells the password", e.stdout)
}

func TestRedisIsReachedByTLS(t *testing.T) {
	t.Parallel()
	r := newRemote(t)
	certs := newCerts(t)
	secure := func(port string) []string {
		return []string{"--tls-port", port, "--tls-auth-clients", "yes",
			"--tls-ca-cert-file", certs.ca, "--tls-cert-file", certs.server, "--tls-key-file", certs.serverKey}
	}
	one, node, sentinel := freePort(t), freePort(t), freePort(t)
	admin := throttletest.Client(t, throttletest.Redis(t, secure(portOf(one))...))
	cluster := newCluster(t, append(secure(portOf(node)), "--tls-cluster", "yes")...)
	newSentinel(t, one, append(secure(portOf(sentinel)), "--tls-replication", "yes")...)

	authority := []string{"--redis-ca", certs.ca}
	identity := []string{"--redis-cert", certs.client, "--redis-key", certs.clientKey}
	both := slices.Concat(authority, identity)
	for _, c := range []struct {
		name, url string
		args      []string
		want      string // instead of success
		keys      redis.Cmdable
	}{
		{"a server", "rediss://" + one, both, "", admin},
		{"a cluster", "rediss-cluster://" + node, both, "", cluster},
		{"a sentinel", "rediss-sentinel://" + sentinel + "?master=mymaster", both, "", admin},
		{"a server as a cluster", "rediss-cluster://" + one, both, "cluster support disabled", nil},
		{"an unknown authority", "rediss://" + one, identity, "certificate signed by unknown authority", nil},
		{"an unknown authority, cluster", "rediss-cluster://" + node, identity, "certificate signed by unknown authority", nil},
		{"an unknown authority, sentinel", "rediss-sentinel://" + sentinel + "?master=mymaster", identity,
			"certificate signed by unknown authority", nil},
		{"another name", "rediss://localhost:" + portOf(one), both, "certificate is not valid for any names", nil},
		{"no client certificate", "rediss://" + one, authority, "certificate required", nil},
		{"no TLS", "redis://" + one, authority, "--redis: goes without TLS, but there are TLS files: must begin with rediss", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			admin.FlushAll(t.Context())
			d := newWorkspace(t, roomy, manyJobs(2, r.URL, ""))
			e := runMain(t.Context(), "", d.args(append(c.args, "--redis", c.url)...)...)
			for c.want != "" && strings.Contains(e.stderr, "reset by peer") { // before the server's alert was read
				e = runMain(t.Context(), "", d.args(append(c.args, "--redis", c.url)...)...)
			}
			if c.want != "" {
				e.want(t, exitBadInput, c.want)
				return
			}
			ran(t, d, e, c.keys)
		})
	}
}

// newCluster starts a cluster of one node, and returns a client of the node.
func newCluster(t *testing.T, args ...string) *redis.Client {
	args = append(args, "--cluster-announce-ip", "127.0.0.1")
	return throttletest.Client(t, servers.Cluster(t, 1, 0, args...).Nodes[0].Addr)
}

// newSentinel starts a sentinel that knows a master by the name mymaster, and returns its address without TLS.
func newSentinel(t *testing.T, master string, args ...string) string {
	host, port, _ := net.SplitHostPort(master)
	addr := freePort(t)
	config := filepath.Join(t.TempDir(), "sentinel.conf")
	text := fmt.Sprintf("port %s\nbind 127.0.0.1\ndir %s\nsentinel monitor mymaster %s %s 1\n",
		portOf(addr), filepath.Dir(config), host, port)
	must(t, os.WriteFile(config, []byte(text), 0o600))
	cmd := exec.Command("redis-server", slices.Concat([]string{config, "--sentinel"}, args)...)
	must(t, cmd.Start())
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	watched := redis.NewSentinelClient(&redis.Options{Addr: addr})
	defer watched.Close()
	waitFor(t, "the sentinel", func() bool {
		_, err := watched.GetMasterAddrByName(t.Context(), "mymaster").Result()
		return err == nil
	})
	return addr
}

func portOf(addr string) string {
	_, port, _ := net.SplitHostPort(addr)
	return port
}

// Without TLS: the first of several addresses may be wrong.
func TestRedisIsReachedOnEveryTopology(t *testing.T) {
	t.Parallel()
	r := newRemote(t)
	dir, err := os.MkdirTemp("", "") // a test's own directory can be too long for a socket
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "s")
	addr := throttletest.Redis(t, "--unixsocket", socket)
	one, second := throttletest.Client(t, addr), redis.NewClient(&redis.Options{Addr: addr, DB: 2})
	defer second.Close()
	cluster, sentinels := newCluster(t), "redis-sentinel://"+closed+","+newSentinel(t, addr)
	node := cluster.Options().Addr
	for url, admin := range map[string]*redis.Client{
		"redis-cluster://" + node:        cluster,
		"redis://" + closed + "," + node: cluster,
		sentinels + "/2?master=mymaster": second,
		"unix://" + socket:               one,
	} {
		admin.FlushAll(t.Context())
		d := newWorkspace(t, roomy, manyJobs(2, r.URL, ""))
		ran(t, d, runMain(t.Context(), "", d.args("--redis", url)...), admin)
	}
	runMain(t.Context(), "", newWorkspace(t, roomy, manyJobs(2, r.URL, "")).args("--redis", sentinels)...).
		want(t, exitBadInput, "--redis: master is missing: must be the name that the sentinels know")
}

// Two environments run the same files on one Redis, at the same time: neither has the other's jobs or counts.
func TestTwoPrefixesShareARedis(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		r := newRemote(t)
		const twoADay = `
policies:
  - name: api
    match: ["http:*"]
    windows:
      - {name: day, limit: 2, period: 24h, shared: true}
`
		d := newWorkspace(t, twoADay, manyJobs(2, r.URL, ""))
		for _, prefix := range []string{"", "staging:", "prod:"} {
			out := d.path("out" + strings.TrimSuffix(prefix, ":") + ".jsonl")
			runMain(t.Context(), "", d.args("--redis", "redis://"+client.Options().Addr, "--prefix", prefix, "--out", out)...).
				want(t, exitDone, "2 jobs: 2 succeeded")
		}
		equal(t, r.total(), 6, "calls")
		keys := valueOf(client.Keys(t.Context(), "*sluice:{api}:*").Result())(t)
		seen := map[string]bool{}
		for _, key := range keys {
			prefix, _, _ := strings.Cut(key, "sluice:{")
			seen[prefix] = true
		}
		that(t, len(seen) == 3 && seen["staging:"] && seen["prod:"] && seen[""], "keys of", seen)
	})
}

// waitFor waits for what another process does.
func waitFor(t *testing.T, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !done(); time.Sleep(10 * time.Millisecond) {
		require(t, !time.Now().After(end), what, "is not ready after 30 s")
	}
}

// Certs are PEM files: an authority, and what it has signed for 127.0.0.1 and for a client.
type certs struct{ ca, server, serverKey, client, clientKey string }

func newCerts(t *testing.T) certs {
	dir := t.TempDir()
	write := func(name, kind string, der []byte) string {
		path := filepath.Join(dir, name)
		must(t, os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
		return path
	}
	serial := int64(0)
	sign := func(name string, template, parent *x509.Certificate, signer *ecdsa.PrivateKey) (cert, keyFile string, key *ecdsa.PrivateKey) {
		key = valueOf(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
		if signer == nil {
			signer = key
		}
		serial++
		template.SerialNumber, template.Subject = big.NewInt(serial), pkix.Name{CommonName: name}
		template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(24*time.Hour)
		der := valueOf(x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer))(t)
		keyDER := valueOf(x509.MarshalPKCS8PrivateKey(key))(t)
		return write(name+".crt", "CERTIFICATE", der), write(name+".key", "PRIVATE KEY", keyDER), key
	}
	ca := &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	var c certs
	var caKey *ecdsa.PrivateKey
	c.ca, _, caKey = sign("ca", ca, ca, nil)
	c.server, c.serverKey, _ = sign("server", &x509.Certificate{
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, // of each other
	}, ca, caKey)
	c.client, c.clientKey, _ = sign("client", &x509.Certificate{ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}, ca, caKey)
	return c
}
