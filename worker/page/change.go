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

const (
	setLimit = "limit" // an action that is logged as published, or overridden
	front    = "front" // an action that is logged as overridden: it sets the weight

	stillDropping = "dropping" // the key, in notices, of a drop that takes long and goes on
)

// An action is a change that a form of the page requests.
type action struct {
	what, policy, tenant string // tenant is empty for all of the policy
	author               control.Author
	form                 url.Values
	claimed              atomic.Bool // by claim
	// What prepare finds out:
	length time.Duration   // of a pause or override; zero if the form has none
	config throttle.Policy // of the policy; the zero Policy if it is not known
	state  control.State
}

// claim returns true to its first caller. That is act, which then makes the change, or inTime, which then gives it up.
func (a *action) claim() bool { return a.claimed.CompareAndSwap(false, true) }

// A preview shows what an action would do. Nothing has been done yet.
type preview struct {
	What, Text string
	Form       url.Values // of the action, to be sent again
	Rows       []previewRow
	Note       string
	Retype     string // a name to be typed in to confirm; if empty, a tick does
	Danger     bool
	do         func(context.Context) error // makes the change
}

// A previewRow has when the last task of a tenant starts, as things are now and after the action.
type previewRow struct{ Tenant, Now, Then string }

var (
	errUnknown = errors.New("whether this was done, or a part of it, is not known")
	errLate    = fmt.Errorf("%w: %w", errSilent, errUnknown)
)

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
	ctx, cancel := context.WithTimeout(r.Context(), changeWithin)
	defer cancel()
	var shown *preview
	a, err := actionOf(r.PostForm, s.Who)
	if err == nil {
		shown, err = p.inTime(ctx, a)
	}
	next := url.Values{"policy": {a.policy}} // the next page shows this policy and tenant
	if a.tenant != "" {
		next.Set("tenant", a.tenant)
	}
	r = r.Clone(ctx)
	r.URL.RawQuery = next.Encode()
	dropGoesOn := err == errLate && a.what == control.Dropped
	switch {
	case errors.Is(err, errUnknown) && !dropGoesOn:
		p.render(w, r, http.StatusGatewayTimeout, sentence(err.Error())+
			". When Redis answers, look at what is in force and at the log, before you repeat it.", nil)
		return
	case err != nil && !dropGoesOn:
		p.render(w, r, http.StatusUnprocessableEntity, sentence(err.Error())+". Nothing has changed.", nil)
		return
	case shown != nil:
		p.render(w, r, http.StatusOK, "", shown)
		return
	}
	next.Set("done", a.what)
	if dropGoesOn {
		next.Set("done", stillDropping)
	}
	p.limiterAnswers.forget()
	p.asynqAnswers.forget()
	redirect(w, "./?"+next.Encode(), http.StatusSeeOther)
}

// actionOf reads a form. On a tenant's page it has the tenant. On a policy's page one can be typed in.
func actionOf(form url.Values, who string) (*action, error) {
	tenant, err := url.QueryUnescape(form.Get("tenant")) // it is escaped, as browsers change line ends in forms
	if err == nil && tenant == "" {
		tenant = form.Get("whom")
	}
	author := control.Author{Who: who, Why: strings.TrimSpace(form.Get("why"))}
	return &action{what: form.Get("what"), policy: form.Get("policy"), tenant: tenant, author: author, form: form}, err
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
	if !a.claim() {
		return nil, errLate
	}
	if _, lastGood := p.limiterAnswers.outage(); time.Since(lastGood) > viewWithin {
		p.limiterAnswers.fails() // the next page has too little time to find out
	}
	return nil, errSilent
}

// act returns what an action would do or, if the operator is sure, does it and returns nil.
func (p *Page) act(ctx context.Context, a *action) (*preview, error) {
	if err := p.prepare(ctx, a); err != nil {
		return nil, err
	}
	shown, err := p.preview(ctx, a)
	if err != nil {
		return nil, err
	}
	version := strconv.FormatInt(a.state.Version, 10)
	sure := a.form.Get("sure")
	if isSure := sure != "" && (shown.Retype == "" || sure == shown.Retype); isSure {
		if seen := a.form.Get("version"); seen != version {
			return nil, fmt.Errorf("version %s: somebody has published version %s since", seen, version)
		}
		if !a.claim() {
			return nil, errSilent
		}
		if err = shown.do(ctx); isSilent(err) || err != nil && a.what == control.Dropped {
			err = fmt.Errorf("%w: %w", err, errUnknown)
		}
		p.config.Logger.Info("page: a change", "what", a.what, "policy", a.policy, "tenant", a.tenant, "who", a.author.Who, "err", err)
		return nil, err
	}
	shown.What = a.what
	shown.Form = url.Values{"version": {version}, "policy": {a.policy}, "tenant": {url.QueryEscape(a.tenant)}}
	for key, values := range a.form {
		if !slices.Contains([]string{"csrf", "policy", "tenant", "whom", "sure", "version"}, key) {
			shown.Form[key] = values
		}
	}
	return shown, nil
}

// prepare checks what all actions need, and finds the policy. Pauses and overrides of a policy that is gone can be ended.
func (p *Page) prepare(ctx context.Context, a *action) (err error) {
	if a.state, err = p.config.Control.State(ctx); err != nil {
		return err
	}
	policies := append(p.config.Limiter.Policies(), a.state.Removed...)
	i := slices.IndexFunc(policies, func(policy throttle.Policy) bool { return policy.Name == a.policy })
	if i >= 0 {
		a.config = policies[i]
	} else if a.what != control.Resumed && a.what != control.Cleared {
		return fmt.Errorf("policy %q: is none of this page's limiter", a.policy)
	}
	if n := len(a.author.Why); n == 0 || n > control.MaxWhyBytes {
		return fmt.Errorf("why: must be given, for the log, in %d bytes at most", control.MaxWhyBytes)
	}
	if text := a.form.Get("for"); text != "" {
		if a.length, err = time.ParseDuration(text); err != nil || a.length <= 0 {
			return fmt.Errorf("for %q: must be a duration such as 30m or 2h", text)
		}
	}
	return nil
}

// preview shows the effects of an action, and has the function that does it.
func (p *Page) preview(ctx context.Context, a *action) (*preview, error) {
	whose := "all tenants"
	if a.tenant != "" {
		whose = "tenant " + short(a.tenant)
	}
	until := clock(time.Now().Add(a.length), time.Now())
	switch a.what {
	case control.Paused:
		text := fmt.Sprintf("Nothing of %s, %s, starts until %s. What waits keeps its place.", a.policy, whose, until)
		return &preview{Text: text, do: func(ctx context.Context) error {
			return p.config.Control.Pause(ctx, a.policy, a.tenant, a.length, a.author)
		}}, nil
	case control.Resumed, control.Cleared:
		ends := map[string]string{control.Resumed: "pause", control.Cleared: "override"}[a.what]
		text := fmt.Sprintf("The %s of %s, %s, ends now. What waits starts as the limits allow.", ends, a.policy, whose)
		return &preview{Text: text, do: func(ctx context.Context) error {
			_, err := p.config.Control.End(ctx, a.what, a.policy, a.tenant, a.author)
			return err
		}}, nil
	case control.WasReset:
		text := fmt.Sprintf("The windows of %s forget what they have counted for %s. The upstream does not: it may refuse.", a.policy, whose)
		return &preview{Text: text, Danger: true, do: func(ctx context.Context) error {
			if err := p.record(ctx, a, ""); err != nil {
				return err
			}
			_, err := p.config.Limiter.Reset(ctx, a.policy, a.tenant)
			return err
		}}, nil
	case control.Dropped:
		return p.previewDrop(ctx, a)
	case setLimit:
		return p.previewLimit(ctx, a, until)
	case control.Overridden, front:
		return p.previewOverride(ctx, a, until)
	}
	return nil, fmt.Errorf("what %q: must be an action of this page", a.what)
}

func (p *Page) record(ctx context.Context, a *action, text string) error {
	return p.config.Control.Record(ctx, control.Change{Author: a.author, Policy: a.policy, Tenant: a.tenant, Text: text, Kind: a.what})
}

func (p *Page) previewDrop(ctx context.Context, a *action) (*preview, error) {
	if p.config.Client == nil || a.tenant == "" {
		return nil, errors.New("drop: needs a tenant, and page.Config.Client")
	}
	s, err := inspect.Of(p.config.Limiter).State(ctx, inspect.Query{Policy: a.policy, Tenant: a.tenant})
	if err != nil {
		return nil, err
	}
	tasks := int64(0)
	for _, t := range s.Tenants {
		if t.Queue != "" { // else they are calls that wait in place
			tasks += t.Waiting
		}
	}
	o := worker.DropOptions{Delete: a.form.Get("then") == "delete", Policy: a.policy, Tenant: a.tenant}
	verb, effect := "archive", "archived: of each queue asynq keeps the last 9,999, for 90 days"
	if o.Delete {
		verb, effect = "delete", "deleted: they are gone"
	}
	text := fmt.Sprintf("%s waiting tasks of %s in %s are %s.", number(tasks), short(a.tenant), a.policy, effect)
	return &preview{Text: text, Danger: true, Retype: name(a.tenant), do: func(ctx context.Context) error {
		if err := p.record(ctx, a, fmt.Sprintf("%s %d waiting tasks", verb, tasks)); err != nil {
			return err
		}
		_, err := p.config.Client.Drop(context.WithoutCancel(ctx), o)
		return err
	}}, nil
}

// previewLimit previews another limit of a window, which is published or, with a length, an override.
func (p *Page) previewLimit(ctx context.Context, a *action, until string) (*preview, error) {
	if a.state.Version == 0 {
		return nil, errors.New("no policies are published: publish a policy file first, by sluice limits publish")
	}
	window := a.form.Get("window")
	limit, err := limitOf(a.form.Get("limit"), window)
	if err != nil {
		return nil, err
	}
	o := throttle.TenantOverride{Policy: a.policy, Windows: map[string]throttle.Override{window: {Limit: limit}}}
	policies, err := a.state.With(o)
	if err != nil {
		return nil, err
	}
	former, then := "It replaces: ", policies
	if a.length == 0 { // overrides go on
		former, until = "Still in force: ", "it is changed again"
		published := a.state
		published.Policies = policies
		then, _ = published.Effective()
	}
	i := slices.IndexFunc(then, func(policy throttle.Policy) bool { return policy.Name == a.policy })
	shown, err := p.simulate(ctx, a, then[i])
	if err != nil {
		return nil, err
	}
	shown.Text = fmt.Sprintf("%s, for all tenants, until %s.", control.Differences(a.state.Policies, policies), until)
	shown.Note = a.overridden(former) + shown.Note
	shown.do = func(ctx context.Context) error {
		if a.length > 0 {
			return p.config.Control.SetOverride(ctx, o, a.length, a.author)
		}
		_, err := p.config.Control.Publish(ctx, policies, a.state.Version, a.author)
		return err
	}
	return shown, nil
}

// previewOverride previews an override of one tenant's settings for a while.
func (p *Page) previewOverride(ctx context.Context, a *action, until string) (*preview, error) {
	o, err := overrideOf(a.policy, a.tenant, a.form)
	if a.what == front {
		o, err = a.state.Front(a.policy, a.tenant, a.length)
	}
	if err != nil {
		return nil, err
	}
	shown, err := p.simulate(ctx, a, a.config, o)
	if err != nil {
		return nil, err
	}
	shown.Text = fmt.Sprintf("%s: %s until %s.", short(a.tenant), control.DescribeOverride(o), until)
	if a.what == front {
		shown.Text = fmt.Sprintf("%s goes before other tenants until %s. Its own limits still apply.", short(a.tenant), until)
	}
	shown.Note = a.overridden("It replaces: ") + shown.Note
	shown.do = func(ctx context.Context) error { return p.config.Control.SetOverride(ctx, o, a.length, a.author) }
	return shown, nil
}

// overridden describes the override in force, and its author, after a prefix.
func (a *action) overridden(prefix string) string {
	if text := a.state.Describe(control.Overridden, a.policy, a.tenant); text != "" {
		return prefix + text + ". "
	}
	return ""
}

const firstTenants = 8 // of which a preview has rows, besides the changed tenant's

// simulate previews when tasks would start by a variant of the policy. The caller adds the text, and what to do.
func (p *Page) simulate(ctx context.Context, a *action, variant throttle.Policy, overrides ...throttle.TenantOverride) (*preview, error) {
	if a.form.Get("sure") != "" {
		return &preview{}, nil // nobody looks at when tasks would start
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
		if i < firstTenants || t.Tenant == a.tenant {
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
		o.Exempt = new(text == "yes")
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
