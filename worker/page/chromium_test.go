package page_test

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

// axeEnv names a file with axe-core, such as node_modules/axe-core/axe.min.js, by which pages are checked.
const axeEnv = "SLUICE_AXE"

// shotsEnv names a directory in which tests leave pictures of the page.
const shotsEnv = "SLUICE_SCREENSHOTS"

// A browser is a Chromium that is spoken to by the DevTools protocol, over two pipes.
type browser struct {
	testing.TB
	in      *os.File
	replies *bufio.Reader

	last    int
	session string
	errors  []string // that scripts and the policy of the page's content have raised
}

// chromium starts a browser that ends with the test. It skips the test where there is none.
func chromium(t testing.TB) *browser {
	t.Helper()
	path := ""
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if found, err := exec.LookPath(name); err == nil {
			path = found
		}
	}
	if path == "" {
		t.Skip("no Chromium is installed: on Debian, apt-get install chromium")
	}
	theirIn, in, err := os.Pipe()
	expect.Must(t, err)
	out, theirOut, err := os.Pipe()
	expect.Must(t, err)
	cmd := exec.Command(path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
		"--hide-scrollbars", "--remote-debugging-pipe", "--user-data-dir="+t.TempDir())
	cmd.ExtraFiles = []*os.File{theirIn, theirOut} // it reads 3 and writes 4
	expect.Must(t, cmd.Start())
	theirIn.Close()
	theirOut.Close()
	b := &browser{TB: t, in: in, replies: bufio.NewReader(out)}
	t.Cleanup(func() {
		in.Close()
		stopped := make(chan struct{})
		go func() { cmd.Wait(); close(stopped) }()
		select {
		case <-stopped:
		case <-time.After(5 * time.Second):
			cmd.Process.Kill()
			<-stopped
		}
		out.Close()
	})
	_ = out.SetReadDeadline(time.Now().Add(2 * time.Minute))
	target := b.call("Target.createTarget", map[string]any{"url": "about:blank"})
	b.session, _ = b.call("Target.attachToTarget", map[string]any{"targetId": target["targetId"], "flatten": true})["sessionId"].(string)
	b.call("Page.enable", nil)
	b.call("Runtime.enable", nil)
	b.call("Log.enable", nil)
	return b
}

// call calls a method of the protocol, and returns its result.
func (b *browser) call(method string, params map[string]any) map[string]any {
	b.Helper()
	b.last++
	message := map[string]any{"id": b.last, "method": method}
	if params != nil {
		message["params"] = params
	}
	if b.session != "" {
		message["sessionId"] = b.session
	}
	text := expect.Got(json.Marshal(message))(b)
	expect.Must(b, expect.ErrOf(b.in.Write(append(text, 0))))
	for {
		text, err := b.replies.ReadBytes(0)
		expect.Require(b, err == nil, method, err)
		var reply struct {
			ID     int
			Method string
			Error  any
			Params json.RawMessage
			Result map[string]any
		}
		expect.Must(b, json.Unmarshal(bytes.TrimSuffix(text, []byte{0}), &reply))
		switch {
		case reply.Method == "Log.entryAdded" || reply.Method == "Runtime.exceptionThrown":
			b.errors = append(b.errors, string(reply.Params))
		case reply.ID != b.last:
		case reply.Error != nil:
			b.Fatalf("%s: %v", method, reply.Error)
		default:
			return reply.Result
		}
	}
}

// eval returns the value of an expression in the page.
func (b *browser) eval(expression string) any {
	b.Helper()
	result := b.call("Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true, "awaitPromise": true})
	thrown := result["exceptionDetails"]
	expect.Require(b, thrown == nil, expression, thrown)
	value, _ := result["result"].(map[string]any)
	return value["value"]
}

// until waits until an expression is true in the page.
func (b *browser) until(expression string) {
	b.Helper()
	holds := "(() => { try { return Boolean(" + expression + ") } catch { return false } })()" // it is still loading
	for end := time.Now().Add(50 * time.Second); b.eval(holds) != true; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			b.Fatalf("waited in vain until %s: %v", expression, b.eval("document.body.innerText"))
		}
	}
}

// open opens an address, and waits until the page is live.
func (b *browser) open(url string) {
	b.Helper()
	b.call("Page.navigate", map[string]any{"url": url})
	b.until("location.href === " + string(expect.Got(json.Marshal(url))(b)) + " && document.getElementById('live')?.textContent.startsWith('Live')")
}

// key presses a key.
func (b *browser) key(name string, code int, text string) {
	b.Helper()
	for _, kind := range []string{"keyDown", "keyUp"} {
		params := map[string]any{"type": kind, "key": name, "windowsVirtualKeyCode": code}
		if kind == "keyDown" && text != "" {
			params["text"] = text
		}
		b.call("Input.dispatchKeyEvent", params)
	}
}

// look sets the size of the screen and the colours that the user prefers.
func (b *browser) look(width int, colours string) {
	b.Helper()
	b.call("Emulation.setDeviceMetricsOverride", map[string]any{
		"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600,
	})
	scheme := map[string]string{"name": "prefers-color-scheme", "value": colours}
	b.call("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{scheme}})
}

// shoot leaves a picture of the whole page, if they are asked for.
func (b *browser) shoot(name string) {
	b.Helper()
	dir := os.Getenv(shotsEnv)
	if dir == "" {
		return
	}
	shot := b.call("Page.captureScreenshot", map[string]any{"captureBeyondViewport": true})
	data, err := base64.StdEncoding.DecodeString(shot["data"].(string))
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, name+".png"), data, 0o600)
	}
	expect.Must(b, err)
}

// axe checks the page by axe-core, if there is one.
func (b *browser) axe() {
	b.Helper()
	path := os.Getenv(axeEnv)
	if path == "" {
		return
	}
	text := expect.Got(os.ReadFile(path))(b)
	b.eval(string(text) + "; 0")
	b.eval("window.found = null; axe.run().then((r) => { window.found = r.violations.map((v) => v.id + ': ' + v.nodes[0].html + ' ' + v.nodes[0].failureSummary).join('\\n') }); 0")
	b.until("window.found !== null")
	expect.Equal(b, b.eval("window.found"), "", "axe-core")
}
