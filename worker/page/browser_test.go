package page_test

import (
	"net/url"
	"strings"
	"testing"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// In a browser the page stays up to date without a reload, keeps focus and what is typed meanwhile,
// is used by keys alone, fits a phone, and runs nobody else's scripts.
func TestThePageWorksInABrowser(t *testing.T) {
	t.Parallel()
	b := chromium(t)
	s := newPageServer(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()))

	// Search, by keys.
	b.open(s.url + "?policy=github")
	b.key("Tab", 9, "")
	expect.Equal(t, b.eval("document.activeElement.innerText"), "Skip to the content", "the first key leads to")
	b.eval("document.getElementById('find').focus()")
	b.call("Input.insertText", map[string]any{"text": "acme-4"})

	// While a link has the focus, news arrive: the API refuses acme's calls.
	b.eval("document.querySelector('tbody [title=acme]').parentElement.focus()")
	s.pause(t.Context(), "")
	b.until("document.getElementById('content').innerText.includes('Paused until')")
	expect.Equal(t, b.eval("document.activeElement.innerText"), "acme", "after news the focus is on")
	b.eval("document.getElementById('find').focus()")
	b.key("Enter", 13, "\r")
	b.until("document.body.innerText.includes('5 of 5 of its tenant')")

	// Sign in, by keys.
	b.open(s.url)
	b.eval("document.querySelector('footer summary').focus()")
	b.key("Enter", 13, "\r")
	b.key("Tab", 9, "")
	b.call("Input.insertText", map[string]any{"text": "anna"})
	b.key("Tab", 9, "")
	b.call("Input.insertText", map[string]any{"text": token})
	b.key("Enter", 13, "\r")
	b.until("document.body.innerText.includes('Signed in as anna')")

	// While a form is filled in, news arrive: a pause by somebody else.
	b.open(s.url + "?policy=github&tenant=acme")
	b.eval("document.getElementById('change-override').open = true; document.querySelector('[name=\"limit minute\"]').focus()")
	b.call("Input.insertText", map[string]any{"text": "50"})
	s.pause(t.Context(), "acme")
	b.until("document.getElementById('content').innerText.includes('acme is paused until')")
	got := b.eval("document.activeElement.name + '=' + document.activeElement.value")
	expect.That(t, got == "limit minute=50", got)
	b.eval("document.querySelector('#change-override [name=why]').value = 'a large customer'; " +
		"document.querySelector('#change-override button').click()")
	b.until("document.getElementById('confirm')?.innerText.includes('nothing has been done yet')")
	b.eval("document.querySelector('[name=sure]').click(); document.querySelector('.confirm button').click()")
	b.until("document.querySelector('.notice')?.innerText === 'The override is in force.'")

	// The hostile name is text wherever it stands.
	text := url.QueryEscape(hostile)
	for _, path := range []string{"?policy=github", "?policy=github&tenant=" + text, "?find=" + text} {
		b.open(s.url + path)
		b.until("document.body.innerText.includes('<script>document.title=')")
	}
	title, parts := b.eval("document.title"), b.eval("document.querySelectorAll('main img, main script').length")
	expect.That(t, !strings.Contains(title.(string), "harmed") && parts == 0.0, "a tenant's name became a part:", title)

	// Held still, nothing moves until it is let go.
	b.open(s.url)
	b.eval("document.getElementById('hold').click()")
	expect.Must(t, expect.ErrOf(s.control.End(t.Context(), control.Resumed, "github", "", control.Author{Who: "bob", Why: "it is back"})))
	b.until("latest !== null && latest.includes('resume')")
	expect.That(t, b.eval("document.getElementById('policy-github').innerText.includes('Paused until')") == true,
		"held still, the page has changed")
	b.eval("document.getElementById('hold').click()")
	b.until("!document.getElementById('policy-github').innerText.includes('Paused until')")

	// Whatever is shown: on a phone nothing is wider than the screen, and controls, tables and meters have names.
	for _, colours := range []string{"light", "dark"} {
		for width, kind := range map[int]string{360: "phone", 400: "large phone", 1400: "desktop"} {
			b.look(width, colours)
			for name, path := range map[string]string{
				"list":   "",
				"policy": "?policy=github",
				"tenant": "?policy=github&tenant=acme",
				"task":   "?find=acme-4",
			} {
				b.open(s.url + path)
				b.shoot(name + "-" + kind + "-" + colours)
				b.axe()
				got := b.eval("document.documentElement.scrollWidth").(float64)
				expect.That(t, got <= float64(width), name, kind, got, width)
			}
		}
	}
	nameless := b.eval(`[...document.querySelectorAll(
			'input:not([type=hidden]), select, meter, svg[role], [role=region], nav, button, a')].filter((e) =>
		!(e.labels?.length || e.getAttribute('aria-label') || e.getAttribute('aria-labelledby') ||
			e.textContent.trim())).map((e) => e.outerHTML).join()`)
	expect.Equal(t, nameless, "", "without a name")
	expect.That(t, len(b.errors) <= 0, "the browser complains:", b.errors)
}
