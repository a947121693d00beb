// Package page is a web page for the people on call: which policies deny, who waits and until when,
// who uses the quota, what was changed. It is one http.Handler that includes its assets, and the page
// updates itself in the browser. It changes nothing, unless it is given a token for operators.
package page

import (
	"cmp"
	"crypto/sha256"
	"embed"
	"errors"
	"fmt"
	"html/template"
	"log/slog"
	"net/http"
	"net/url"
	"strings"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/worker"
)

// Config configures a Page.
type Config struct {
	// Asynqmon is the address of asynqmon in browsers, such as "https://ops.example.com/asynqmon" or
	// "/asynqmon". Tasks link to it. The default, empty, links nowhere.
	Asynqmon string

	// Client looks up tasks, and drops them. The default, nil, does neither. The caller closes it.
	Client *worker.Client

	// Control keeps overrides, pauses and the log of changes, which the page shows. The default, nil, shows none.
	Control *control.Store

	// Inspector finds the queues in which Client looks for a task's ID, paused queues, and servers. The default,
	// nil, finds none. The caller closes it.
	Inspector *asynq.Inspector

	// Limiter has the policies that the page shows. It is required. The page shows grants if processes have a
	// usage.Counter.
	Limiter *throttle.Limiter

	// Logger gets sign-ins, changes and errors. The default is slog.Default().
	Logger *slog.Logger

	// Token lets operators who know it change limits, pause, reset windows and drop tasks. It has at least
	// 16 bytes. The default, empty, makes the page read-only. The page has no login for
	// readers: put it behind your own access control.
	Token string
}

// A Page is an http.Handler. Mount it below a path of its own, without that path:
//
//	mux.Handle("/sluice/", http.StripPrefix("/sluice", page))
//
// It is safe for concurrent use.
type Page struct {
	config         Config
	guard          *guard // nil if the page is read-only
	starvation     inspect.StarvationDetector
	mux            *http.ServeMux
	limiterAnswers answers       // of the limiter's Redis
	asynqAnswers   answers       // of asynq's Redis
	viewers        chan struct{} // has one value for each browser that follows the page
}

// New returns a page. It calls no Redis. The error names the field of the Config that is invalid.
func New(c Config) (*Page, error) {
	if c.Limiter == nil {
		return nil, errors.New("page: Config.Limiter is nil: must be what throttle.New returns")
	}
	c.Logger = cmp.Or(c.Logger, slog.Default())
	c.Asynqmon = strings.TrimSuffix(c.Asynqmon, "/")
	if !isAddress(c.Asynqmon) {
		return nil, fmt.Errorf("page: Config.Asynqmon %q: "+
			"must be the address of asynqmon, such as https://HOST/PATH or /PATH", c.Asynqmon)
	}
	p := &Page{config: c, mux: http.NewServeMux(), viewers: make(chan struct{}, maxViewers)}
	switch {
	case c.Token == "": // the page is read-only
	case len(c.Token) < 16:
		return nil, fmt.Errorf("page: Config.Token has %d bytes: "+
			"must have at least 16, or none for a page that changes nothing", len(c.Token))
	case c.Control == nil:
		return nil, errors.New("page: Config.Token is set, and Config.Control is nil: must be what control.StoreOf returns")
	default:
		p.guard = &guard{token: sha256.Sum256([]byte(c.Token)), origin: http.NewCrossOriginProtection()}
		p.mux.HandleFunc("POST /sign-in", p.signIn)
		p.mux.HandleFunc("POST /sign-out", p.signOut)
		p.mux.HandleFunc("POST /change", p.change)
	}
	p.mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, r *http.Request) {
		p.render(w, r, http.StatusOK, "", nil)
	})
	p.mux.HandleFunc("GET /live", p.live)
	p.mux.HandleFunc("GET /queues/{queue}/tasks/{task}", p.likeAsynqmon)
	p.mux.HandleFunc("GET /icon.svg", p.asset)
	p.mux.HandleFunc("GET /page.css", p.asset)
	p.mux.HandleFunc("GET /page.js", p.asset)
	return p, nil
}

//go:embed assets
var assets embed.FS

var templates = template.Must(template.New("").Funcs(functions).ParseFS(assets, "assets/*.html"))

// isAddress reports whether a text is "", a URL of the web, or a path on this host.
func isAddress(text string) bool {
	u, err := url.Parse(text)
	if err != nil || u.RawQuery != "" || u.Fragment != "" {
		return false
	}
	if u.Scheme == "" {
		return text == "" || strings.HasPrefix(text, "/")
	}
	return u.Scheme == "https" || u.Scheme == "http"
}

// ServeHTTP serves the page and all that belongs to it.
func (p *Page) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	// Nothing is loaded from other sites, the page has no inline script or style, nobody frames it.
	h.Set("Content-Security-Policy", "default-src 'none'; "+
		"script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "+
		"form-action 'self'; base-uri 'none'; frame-ancestors 'none'")
	h.Set("Cache-Control", "no-store")
	h.Set("Referrer-Policy", "same-origin")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	if r.URL.Path == "" { // StripPrefix left nothing, but relative links need the slash
		path, query, _ := strings.Cut(r.RequestURI, "?")
		if query != "" {
			query = "?" + query
		}
		http.Redirect(w, r, "/"+strings.Trim(path, "/")+"/"+query, http.StatusMovedPermanently)
		return
	}
	p.mux.ServeHTTP(w, r)
}

func (p *Page) asset(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Cache-Control", "no-cache")
	http.ServeFileFS(w, r, assets, "assets"+r.URL.Path)
}

// likeAsynqmon redirects from the path that a task has in asynqmon to the task on this page.
func (p *Page) likeAsynqmon(w http.ResponseWriter, r *http.Request) {
	q := url.Values{"queue": {r.PathValue("queue")}, "task": {r.PathValue("task")}}
	redirect(w, "../../../?"+q.Encode(), http.StatusFound)
}

// redirect leads to an address relative to the browser's, as the page does not know the path at which it
// is mounted.
func redirect(w http.ResponseWriter, to string, status int) {
	w.Header().Set("Location", to)
	w.WriteHeader(status)
}

// render answers with the page. It tells of a problem unless that is empty, and shows a preview unless that is nil.
func (p *Page) render(w http.ResponseWriter, r *http.Request, status int, problem string, shown *preview) {
	v := p.view(r.Context(), questionOf(r), p.sessionOf(r))
	v.Problem, v.Preview = problem, shown
	v.NewsQuery = r.URL.RawQuery // after a form the browser does not know it: its address is the form's
	var text strings.Builder
	if err := templates.ExecuteTemplate(&text, "page.html", v); err != nil {
		p.config.Logger.Error("page: the page cannot be made", "err", err)
		http.Error(w, "the page cannot be made: see the log", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(status)
	_, _ = w.Write([]byte(text.String()))
}
