package servers

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

// A Zone is one limit_req of nginx: a leaky bucket of Rate requests a second that, by nodelay, takes Burst + 1 at
// once.
type Zone struct{ Rate, Burst int }

// An NginxProcess is a running nginx, a limiter by other people.
type NginxProcess struct {
	*Process

	dir string
}

// Nginx starts an nginx of its own on a free loopback port, with all zones in front of a server, until the test ends.
func Nginx(t testing.TB, upstream string, zones ...Zone) *NginxProcess {
	t.Helper()
	if _, err := exec.LookPath("nginx"); err != nil {
		expect.Require(t, os.Getenv(requireEnv) == "", "nginx is not installed, and", requireEnv, "is set")
		t.Skip("nginx is not installed: scripts/test installs it")
	}
	dir := t.TempDir()
	var define, apply strings.Builder
	for i, z := range zones {
		fmt.Fprintf(&define, "limit_req_zone $server_name zone=zone%d:1m rate=%dr/s;\n", i, z.Rate)
		fmt.Fprintf(&apply, "limit_req zone=zone%d", i)
		if z.Burst > 0 {
			fmt.Fprintf(&apply, " burst=%d nodelay", z.Burst)
		}
		apply.WriteString(";\n")
	}
	log := filepath.Join(dir, "error.log")
	p := expect.Got(startOnFreePort(log, func(port int) (*exec.Cmd, error) {
		text := strings.NewReplacer("DIR", dir, "LISTEN", fmt.Sprintf("127.0.0.1:%d", port), "UPSTREAM", upstream,
			"DEFINE", define.String(), "APPLY", apply.String()).Replace(nginxConfig)
		config := filepath.Join(dir, "nginx.conf")
		return exec.Command("nginx", "-p", dir, "-c", config, "-e", log), os.WriteFile(config, []byte(text), 0o600)
	}))(t)
	t.Cleanup(p.Stop)
	return &NginxProcess{p, dir}
}

// Logged returns how many answers of a status nginx has logged.
func (p *NginxProcess) Logged(status int) (int, error) {
	text, err := os.ReadFile(filepath.Join(p.dir, "access.log"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return 0, err
	}
	return strings.Count(string(text), fmt.Sprintln(status)), nil
}

// Without a master, Stop ends the only process. All that it writes is in DIR.
const nginxConfig = `
daemon off;
master_process off;
pid DIR/nginx.pid;
error_log DIR/error.log;
events { worker_connections 1024; }
http {
	log_format status "$status";
	access_log DIR/access.log status;
	client_body_temp_path DIR/body;
	proxy_temp_path DIR/proxy;
	fastcgi_temp_path DIR/fastcgi;
	uwsgi_temp_path DIR/uwsgi;
	scgi_temp_path DIR/scgi;
	keepalive_requests 1000000;
	DEFINE
	upstream far {
		server UPSTREAM;
		keepalive 64;
	}
	server {
		listen LISTEN;
		server_name far; # the key of the zones: an empty one is not limited
		location / {
			APPLY
			proxy_pass http://far;
			proxy_http_version 1.1;
			proxy_set_header Connection "";
		}
	}
}
`
