package page

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle/control"
)

const (
	cookieName  = "sluice_operator"
	signedInFor = 8 * time.Hour
	maxForm     = 64 << 10 // bytes
)

// A guard lets operators who know the token make changes. It stores no sessions: a session is a cookie
// that the token signs, so that several processes can serve the page.
type guard struct {
	token  [sha256.Size]byte // its hash
	origin *http.CrossOriginProtection
}

// A session is a browser that is signed in.
type session struct {
	Nonce string
	Until time.Time
	Who   string // the name that the operator gave
	CSRF  string `json:"-"` // what each form carries
}

// mac signs a text for a purpose.
func (g *guard) mac(purpose, text string) string {
	m := hmac.New(sha256.New, g.token[:])
	m.Write([]byte(purpose + "\x00" + text))
	return base64.RawURLEncoding.EncodeToString(m.Sum(nil))
}

// sessionOf returns the session of a request, nil if there is none.
func (p *Page) sessionOf(r *http.Request) *session {
	cookie, err := r.Cookie(cookieName)
	if p.guard == nil || err != nil {
		return nil
	}
	text, mac, _ := strings.Cut(cookie.Value, ".")
	if !hmac.Equal([]byte(mac), []byte(p.guard.mac("session", text))) {
		return nil
	}
	data, err := base64.RawURLEncoding.DecodeString(text)
	s := &session{CSRF: p.guard.mac("form", text)}
	if err != nil || json.Unmarshal(data, s) != nil || !s.Until.After(time.Now()) {
		return nil
	}
	return s
}

// setSession makes the browser keep a session, or forget it if s is nil. The cookie's path is the page's.
func (p *Page) setSession(w http.ResponseWriter, r *http.Request, s *session) {
	cookie := &http.Cookie{Name: cookieName, MaxAge: -1, HttpOnly: true, SameSite: http.SameSiteStrictMode, Secure: r.TLS != nil}
	if s != nil {
		data, _ := json.Marshal(s) // strings and a time
		text := base64.RawURLEncoding.EncodeToString(data)
		cookie.Value, cookie.MaxAge = text+"."+p.guard.mac("session", text), int(signedInFor.Seconds())
	}
	http.SetCookie(w, cookie)
}

// form reads a form of this page. For any other request it answers with an error, and returns false.
func (p *Page) form(w http.ResponseWriter, r *http.Request) bool {
	if err := p.guard.origin.Check(r); err != nil {
		http.Error(w, "this comes from another site: "+err.Error(), http.StatusForbidden)
		return false
	}
	r.Body = http.MaxBytesReader(w, r.Body, maxForm)
	if err := r.ParseForm(); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return false
	}
	return true
}

func (p *Page) signIn(w http.ResponseWriter, r *http.Request) {
	if !p.form(w, r) {
		return
	}
	who, token := strings.TrimSpace(r.PostForm.Get("who")), sha256.Sum256([]byte(r.PostForm.Get("token")))
	switch {
	case subtle.ConstantTimeCompare(token[:], p.guard.token[:]) != 1:
		p.config.Logger.Warn("page: a sign-in with another token", "who", who, "from", r.RemoteAddr)
		p.render(w, r, http.StatusUnauthorized, "This is not the token.", nil)
		return
	case who == "" || len(who) > control.MaxWhoBytes:
		p.render(w, r, http.StatusUnprocessableEntity,
			"Your name is missing, or too long: it stands in the log beside what you change.", nil)
		return
	}
	p.config.Logger.Info("page: somebody has signed in", "who", who, "from", r.RemoteAddr)
	p.setSession(w, r, &session{Nonce: rand.Text(), Until: time.Now().Add(signedInFor), Who: who})
	redirect(w, "./?done=in", http.StatusSeeOther)
}

func (p *Page) signOut(w http.ResponseWriter, r *http.Request) {
	if !p.form(w, r) {
		return
	}
	p.setSession(w, r, nil)
	redirect(w, "./?done=out", http.StatusSeeOther)
}
