package page

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/worker"
)

// Actions of operators that are not in the log by these names.
const (
	setLimit = "limit" // logged as published, or overridden
	front    = "front" // logged as overridden: it sets the weight
)

// A preview shows what an action would do. Nothing has been done yet.
type preview struct {
	What, Text string
	Form       url.Values // of the action, to be sent again
	Rows       []previewRow
	Note       string
	Name       string // to be typed in to confirm; if empty, a tick does
	Danger     bool
}

// A previewRow has when the last task of a tenant starts, as things are now and after the action.
type previewRow struct{ Tenant, Now, Then string }

// An action is a change that a form of the page requests.
type action struct {
	what, policy, tenant string
	length               time.Duration
	author               control.Author
	form                 url.Values
	config               throttle.Policy // of the policy
	state                control.State
	claimed              atomic.Bool // set by act, which then makes the change, or by inTime: then it is never made
}

var (
	errUnknown = errors.New("whether this was done, or a part of it, is not known")
	errLate    = fmt.Errorf("%w: %w", errSilent, errUnknown)
)

// dropping is the notice's key for a drop that takes long and goes on.
const dropping = "dropping"

// change shows what an operator's form would do, or does it if the operator is sure.
func (p *Page) change(w http.ResponseWriter, r *http.Request) {
	if !p.form(w, r) {
		return
	}
	s := p.sessionOf(r)
	switch {
	case s == nil:
		p.render(w, r, http.StatusUnauthorized, "You are not signed in any more: nothing has changed.", nil)
		return
	case subtle.ConstantTimeCompare([]byte(r.PostForm.Get("csrf")), []byte(s.CSRF)) != 1:
		http.Error(w, "the form is not one of this session: load the page again. Nothing has changed.",
			http.StatusForbidden)
		return
	}
	tenant, err := url.QueryUnescape(r.PostForm.Get("tenant")) // browsers change line ends in forms
	if typed := r.PostForm.Get("whom"); err == nil && tenant == "" {
		tenant = typed
	}
	back := url.Values{"policy": {r.PostForm.Get("policy")}}
	if tenant != "" {
		back.Set("tenant", tenant)
	}
	a := action{what: r.PostForm.Get("what"), policy: r.PostForm.Get("policy"), tenant: tenant, form: r.PostForm,
		author: control.Author{Who: s.Who, Why: strings.TrimSpace(r.PostForm.Get("why"))}}
	ctx, cancel := context.WithTimeout(r.Context(), changeWithin)
	defer cancel()
	var shown *preview
	if err == nil {
		shown, err = p.inTime(ctx, &a)
	}
	r = r.Clone(ctx)
	r.URL.RawQuery = back.Encode() // what is shown now: the page of that policy and tenant
	back.Set("done", a.what)
	switch {
	case err == errLate && a.what == control.Dropped:
		back.Set("done", dropping)
	case errors.Is(err, errUnknown):
		p.render(w, r, http.StatusGatewayTimeout, sentence(err.Error())+
			". When Redis answers, look at what is in force and at the log, before you repeat it.", nil)
		return
	case err != nil:
		p.render(w, r, http.StatusUnprocessableEntity, sentence(err.Error())+". Nothing has changed.", nil)
		return
	case shown != nil:
		p.render(w, r, http.StatusOK, "", shown)
		return
	}
	p.recent.forget()
	p.asynq.forget()
	redirect(w, "./?"+back.Encode(), http.StatusSeeOther)
}

// inTime waits for act as long as a page does. An action that has begun by then goes on. Any other never begins.
func (p *Page) inTime(ctx context.Context, a *action) (*preview, error) {
	var shown *preview
	var err error
	done := make(chan struct{})
	go func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askTimeout)
		defer cancel()
		shown, err = p.act(ctx, a)
		close(done)
	}()
	select {
	case <-done:
		return shown, err
	case <-time.After(viewWithin):
	}
	if a.claimed.CompareAndSwap(false, true) {
		if _, good := p.recent.outage(); time.Since(good) > viewWithin { // the next page has too little time to find out
			p.recent.fails()
		}
		return nil, errSilent
	}
	return nil, errLate
}

// act returns what an action would do, or does it and returns nil.
func (p *Page) act(ctx context.Context, a *action) (*preview, error) {
	var err error
	if a.state, err = p.config.Control.State(ctx); err != nil {
		return nil, err
	}
	policies := append(p.config.Limiter.Policies(), a.state.Removed...)
	i := slices.IndexFunc(policies, func(policy throttle.Policy) bool { return policy.Name == a.policy })
	switch ends := a.what == control.Resumed || a.what == control.Cleared; { // also of a policy that was removed
	case i >= 0:
		a.config = policies[i]
	case !ends:
		return nil, fmt.Errorf("policy %q: is none of this page's limiter", a.policy)
	}
	if n := len(a.author.Why); n == 0 || n > control.MaxWhyBytes {
		return nil, fmt.Errorf("why: must be given, for the log, in %d bytes at most", control.MaxWhyBytes)
	}
	if text := a.form.Get("for"); text != "" {
		if a.length, err = time.ParseDuration(text); err != nil || a.length <= 0 {
			return nil, fmt.Errorf("for %q: must be a duration such as 30m or 2h", text)
		}
	}
	do, shown, err := p.preview(ctx, a)
	if err != nil {
		return nil, err
	}
	version := strconv.FormatInt(a.state.Version, 10)
	if sure := a.form.Get("sure"); sure != "" && (shown.Name == "" || sure == shown.Name) {
		if seen := a.form.Get("version"); seen != version {
			return nil, fmt.Errorf("version %s: somebody has published version %s since", seen, version)
		}
		if !a.claimed.CompareAndSwap(false, true) {
			return nil, errSilent
		}
		if err = do(ctx); isSilent(err) || err != nil && a.what == control.Dropped {
			err = fmt.Errorf("%w: %w", err, errUnknown)
		}
		p.config.Logger.Info("page: a change", "what", a.what, "policy", a.policy, "tenant", a.tenant, "who", a.author.Who, "err", err)
		return nil, err
	}
	shown.What, shown.Form = a.what, url.Values{"version": {version}, "policy": {a.policy}, "tenant": {url.QueryEscape(a.tenant)}}
	for key, values := range a.form {
		if !slices.Contains([]string{"csrf", "policy", "tenant", "whom", "sure", "version"}, key) {
			shown.Form[key] = values
		}
	}
	return shown, nil
}

// preview returns the function that does an action, and a preview of its effects.
func (p *Page) preview(ctx context.Context, a *action) (do func(context.Context) error, shown *preview, err error) {
	who := "all tenants"
	if a.tenant != "" {
		who = "tenant " + short(a.tenant)
	}
	until := clock(time.Now().Add(a.length), time.Now())
	shown = &preview{}
	switch a.what {
	case control.Paused:
		shown.Text = fmt.Sprintf("Nothing of %s, %s, starts until %s. What waits keeps its place.", a.policy, who, until)
		return func(ctx context.Context) error {
			return p.config.Control.Pause(ctx, a.policy, a.tenant, a.length, a.author)
		}, shown, nil
	case control.Resumed, control.Cleared:
		ends := map[string]string{control.Resumed: "pause", control.Cleared: "override"}[a.what]
		shown.Text = fmt.Sprintf("The %s of %s, %s, ends now. What waits starts as the limits allow.", ends, a.policy, who)
		return func(ctx context.Context) error {
			_, err := p.config.Control.End(ctx, a.what, a.policy, a.tenant, a.author)
			return err
		}, shown, nil
	case control.WasReset:
		shown.Danger = true
		shown.Text = fmt.Sprintf("The windows of %s forget what they have counted for %s. The upstream does not: it may refuse.", a.policy, who)
		return func(ctx context.Context) error {
			if err := p.record(ctx, a, ""); err != nil {
				return err
			}
			_, err := p.config.Limiter.Reset(ctx, a.policy, a.tenant)
			return err
		}, shown, nil
	case control.Dropped:
		return p.previewDrop(ctx, a)
	case setLimit:
		return p.previewLimit(ctx, a, until)
	case control.Overridden, front:
		return p.previewOverride(ctx, a, until)
	}
	return nil, nil, fmt.Errorf("what %q: must be an action of this page", a.what)
}

func (p *Page) record(ctx context.Context, a *action, text string) error {
	return p.config.Control.Record(ctx, control.Change{Author: a.author, Policy: a.policy, Tenant: a.tenant, Text: text, Kind: a.what})
}

func (p *Page) previewDrop(ctx context.Context, a *action) (func(context.Context) error, *preview, error) {
	if p.config.Client == nil || a.tenant == "" {
		return nil, nil, errors.New("drop: needs a tenant, and page.Config.Client")
	}
	s, err := inspect.Of(p.config.Limiter).State(ctx, inspect.Query{Policy: a.policy, Tenant: a.tenant})
	if err != nil {
		return nil, nil, err
	}
	waiting := int64(0)
	for _, t := range s.Tenants {
		if t.Queue != "" { // else they are calls that wait in place
			waiting += t.Waiting
		}
	}
	o := worker.DropOptions{Delete: a.form.Get("then") == "delete", Policy: a.policy, Tenant: a.tenant}
	does, then := "archive", "archived: of each queue asynq keeps the last 9,999, for 90 days"
	if o.Delete {
		does, then = "delete", "deleted: they are gone"
	}
	shown := &preview{Danger: true, Name: name(a.tenant),
		Text: fmt.Sprintf("%s waiting tasks of %s in %s are %s.", number(waiting), short(a.tenant), a.policy, then)}
	return func(ctx context.Context) error {
		if err := p.record(ctx, a, fmt.Sprintf("%s %d waiting tasks", does, waiting)); err != nil {
			return err
		}
		_, err := p.config.Client.Drop(context.WithoutCancel(ctx), o)
		return err
	}, shown, nil
}

// previewLimit previews another limit of a window, published or as an override for a while.
func (p *Page) previewLimit(ctx context.Context, a *action, until string) (func(context.Context) error, *preview, error) {
	if a.state.Version == 0 {
		return nil, nil, errors.New("no policies are published: publish a policy file first, by sluice limits publish")
	}
	limit, err := limitOf(a.form.Get("limit"), a.form.Get("window"))
	if err != nil {
		return nil, nil, err
	}
	o := throttle.TenantOverride{Policy: a.policy, Windows: map[string]throttle.Override{a.form.Get("window"): {Limit: limit}}}
	policies, err := a.state.With(o)
	if err != nil {
		return nil, nil, err
	}
	i := slices.IndexFunc(policies, func(policy throttle.Policy) bool { return policy.Name == a.policy })
	shown, err := p.simulate(ctx, a, policies[i])
	if err != nil {
		return nil, nil, err
	}
	replaces := "It replaces: "
	if a.length == 0 {
		replaces, until = "Still in force: ", "it is changed again"
	}
	shown.Text = fmt.Sprintf("%s, for all tenants, until %s.", control.Differences(a.state.Policies, policies), until)
	shown.Note = a.overridden(replaces) + shown.Note
	return func(ctx context.Context) error {
		if a.length > 0 {
			return p.config.Control.SetOverride(ctx, o, a.length, a.author)
		}
		_, err := p.config.Control.Publish(ctx, policies, a.state.Version, a.author)
		return err
	}, shown, nil
}

// previewOverride previews an override of one tenant's settings for a while.
func (p *Page) previewOverride(ctx context.Context, a *action, until string) (func(context.Context) error, *preview, error) {
	o, err := overrideOf(a.policy, a.tenant, a.form)
	if a.what == front {
		o, err = a.state.Front(a.policy, a.tenant, a.length)
	}
	if err != nil {
		return nil, nil, err
	}
	shown, err := p.simulate(ctx, a, a.config, o)
	if err != nil {
		return nil, nil, err
	}
	shown.Text = fmt.Sprintf("%s: %s until %s.", short(a.tenant), control.DescribeOverride(o), until)
	if a.what == front {
		shown.Text = fmt.Sprintf("%s goes before other tenants until %s. Its own limits still apply.", short(a.tenant), until)
	}
	shown.Note = a.overridden("It replaces: ") + shown.Note
	return func(ctx context.Context) error { return p.config.Control.SetOverride(ctx, o, a.length, a.author) }, shown, nil
}

// overridden describes the override in force, and its author, after a prefix.
func (a *action) overridden(prefix string) string {
	if text := a.state.Describe(control.Overridden, a.policy, a.tenant); text != "" {
		return prefix + text + ". "
	}
	return ""
}

const previewRows = 8 // of tenants, and one more for the changed tenant

// simulate compares when tasks would start.
func (p *Page) simulate(ctx context.Context, a *action, variant throttle.Policy, overrides ...throttle.TenantOverride) (*preview, error) {
	if a.form.Get("sure") != "" {
		return &preview{}, nil // nobody sees it
	}
	ctx, cancel := context.WithTimeout(ctx, viewWithin/2)
	defer cancel()
	now, then, err := inspect.Of(p.config.Limiter).Simulate(ctx, variant, overrides...)
	if isSilent(err) {
		return &preview{Note: "When tasks would start could not be simulated in time."}, nil
	} else if err != nil {
		return nil, err
	}
	lastStart := func(f inspect.Finish) string {
		if f.Expected.IsZero() {
			return "not known"
		}
		return clock(f.Expected, now.At)
	}
	shown := &preview{Note: "If nothing else comes. Refusals by the upstream are not foreseen."}
	thenOf := map[string]inspect.Finish{}
	for _, t := range then.Tenants {
		thenOf[t.Tenant] = t
	}
	for i, t := range now.Tenants {
		if i < previewRows || t.Tenant == a.tenant {
			shown.Rows = append(shown.Rows, previewRow{short(t.Tenant), lastStart(t), lastStart(thenOf[t.Tenant])})
		}
	}
	if now.Count > 0 {
		shown.Rows = append(shown.Rows, previewRow{"all " + number(int64(now.Count)), lastStart(now.Finish), lastStart(then.Finish)})
	}
	return shown, nil
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
		limit, err := limitOf(text, window)
		if err != nil {
			return o, err
		}
		o.Windows[window] = throttle.Override{Limit: limit}
	}
	if o.Weight == 0 && o.Exempt == nil && len(o.Windows) == 0 {
		return o, errors.New("override: must change a limit, the weight, or whether the tenant is exempt")
	}
	return o, nil
}

func limitOf(text, window string) (int64, error) {
	limit, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	if err != nil || limit < 1 {
		return 0, fmt.Errorf("limit %q of window %s: must be a whole number above 0", text, window)
	}
	return limit, nil
}
