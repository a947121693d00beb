package page

import (
	"context"
	"crypto/subtle"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
)

// change does what an operator's form asks for.
func (p *Page) change(w http.ResponseWriter, r *http.Request) {
	if !p.form(w, r) {
		return
	}
	s := p.sessionOf(r)
	switch {
	case s == nil:
		p.render(w, r, http.StatusUnauthorized, "You are not signed in any more: nothing has changed.")
		return
	case subtle.ConstantTimeCompare([]byte(r.PostForm.Get("csrf")), []byte(s.CSRF)) != 1:
		http.Error(w, "the form is not one of this session: load the page again. Nothing has changed.",
			http.StatusForbidden)
		return
	}
	policy := r.PostForm.Get("policy")
	tenant, err := url.QueryUnescape(r.PostForm.Get("tenant")) // browsers change line ends in forms
	if err == nil {
		err = p.do(r.Context(), s, policy, tenant, r.PostForm)
	}
	back := url.Values{"policy": {policy}}
	if tenant != "" {
		back.Set("tenant", tenant)
	}
	if err != nil {
		r.URL.RawQuery = back.Encode()
		p.render(w, r, http.StatusUnprocessableEntity, said(err)+". Nothing has changed.")
		return
	}
	p.recent.forget()
	what := r.PostForm.Get("what")
	p.config.Logger.Info("page: a change", "what", what, "policy", policy, "tenant", tenant, "who", s.Who)
	back.Set("done", what)
	redirect(w, "./?"+back.Encode(), http.StatusSeeOther)
}

func (p *Page) do(ctx context.Context, s *session, policy, tenant string, form url.Values) error {
	if _, ok := p.config.Limiter.Lookup(policy); !ok {
		return fmt.Errorf("policy %q: is none of this page's limiter", policy)
	}
	by := control.By{Who: s.Who, Why: strings.TrimSpace(form.Get("why"))}
	switch what := form.Get("what"); what {
	case control.Paused, control.Overridden:
		length, err := time.ParseDuration(form.Get("for"))
		if err != nil {
			return fmt.Errorf("for %q: must be a duration such as 30m or 2h", form.Get("for"))
		}
		if what == control.Paused {
			return p.config.Control.Pause(ctx, policy, tenant, length, by)
		}
		o, err := overrideOf(policy, tenant, form)
		if err == nil {
			err = p.config.Limiter.ValidateOverride(o)
		}
		if err != nil {
			return err
		}
		return p.config.Control.SetOverride(ctx, o, length, by)
	case control.Resumed:
		_, err := p.config.Control.Resume(ctx, policy, tenant, by)
		return err
	case control.Cleared:
		_, err := p.config.Control.ClearOverride(ctx, policy, tenant, by)
		return err
	default:
		return fmt.Errorf("what %q: must be %s, %s, %s or %s",
			what, control.Paused, control.Resumed, control.Overridden, control.Cleared)
	}
}

// overrideOf reads an override. Empty fields keep what the policy says.
func overrideOf(policy, tenant string, form url.Values) (throttle.TenantOverride, error) {
	o := throttle.TenantOverride{Policy: policy, Tenant: tenant, Windows: map[string]throttle.Override{}}
	if text := form.Get("weight"); text != "" {
		weight, err := strconv.ParseFloat(text, 64)
		if err != nil || weight <= 0 {
			return o, fmt.Errorf("weight %q: must be a number above 0", text)
		}
		o.Weight = weight
	}
	if text := form.Get("exempt"); text != "" {
		exempt := text == "yes"
		o.Exempt = &exempt
	}
	for field := range form {
		window, ok := strings.CutPrefix(field, "limit ")
		text := strings.TrimSpace(form.Get(field))
		if !ok || text == "" {
			continue
		}
		limit, err := strconv.ParseInt(text, 10, 64)
		if err != nil || limit < 1 {
			return o, fmt.Errorf("limit %q of window %s: must be a whole number above 0", text, window)
		}
		o.Windows[window] = throttle.Override{Limit: limit}
	}
	return o, nil
}
