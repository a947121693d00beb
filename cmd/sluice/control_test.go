package main

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/policyfile"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
)

const controlled = `
policies:
  - name: api
    match: [call]
    windows:
      - {name: pace, limit: 40, period: 1s, shared: true}
      - {name: minute, limit: 20, period: 60s}
`

// An operator's commands, one after the other, in one Redis.
func TestOperatorsChangeWhatIsInForce(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		d := newWorkspace(t, controlled, "")
		run := func(args ...string) runResult {
			return runMain(t.Context(), "", append(args, "--redis", "redis://"+client.Options().Addr, "--by", "anna")...)
		}
		look := func(args ...string) runResult {
			return runMain(t.Context(), "", append(args, "--redis", "redis://"+client.Options().Addr)...)
		}
		says := func(e runResult, stdout string) {
			t.Helper()
			e.want(t, exitDone).says(t, stdout)
		}
		says(look("limits", "show"), "no policies are published")
		says(run("pause", "api", "--for", "10m", "--why", "down"), "api is paused until ")
		says(run("resume", "api", "--why", "up"), "api is not paused any more by an operator (a pause by the upstream")
		says(run("resume", "api", "--why", "up"), "api was not paused by an operator")
		must(t, client.FlushAll(t.Context()).Err())
		run("limits", "set", "api", "pace", "--limit", "3", "--why", "x").want(t, exitBadInput, "no policies are published: publish")
		run("reset", "api", "--why", "x").want(t, exitBadInput, `policy "api": must be one of those published: there are none`)
		run("limits", "rollback", "--why", "x").want(t, exitBadInput, "the log has no policies from before version 0")
		run("limits", "publish", d.path("policies.yml")).want(t, exitBadInput, "--why is missing")
		says(run("limits", "publish", d.path("policies.yml"), "--why", "first"), "published version 1")
		says(run("limits", "publish", d.path("policies.yml"), "--why", "again"), "published already, as version 1")
		run("limits", "publish", d.path("policies.yml"), "--version", "0", "--why", "again").
			want(t, exitFailed, "version 0 was to be replaced, and 1 is in force")
		says(run("limits", "set", "api", "pace", "--limit", "30", "--why", "raised"), "published version 2: api/pace 40/s -> 30/s")
		run("limits", "set", "api", "pce", "--limit", "30", "--why", "x").want(t, exitBadInput, `window "pce": must be one of pace, minute`)
		run("limits", "set", "api", "pace", "--limit=-3", "--why", "x").want(t, exitBadInput, "limit -3: must be 1 to")
		run("limits", "set", "api", "pace", "--limit", "3", "--for", "99999h", "--why", "x").want(t, exitBadInput, `"99999h" for flag -for: must be 1ms to 8784h0m0s: see`)

		says(run("limits", "set", "api", "pace", "--limit", "9", "--for", "2h", "--why", "a bad day"), "api: pace 9 until ")
		says(run("limits", "set", "api", "pace", "--limit", "8", "--for", "2h", "--why", "worse"), ", instead of pace 9 until ")
		says(look("limits", "show"), "(all)")
		says(look("limits", "log", "--last", "1"), "pace 8 for 2h, instead of pace 9 until ")
		says(run("limits", "clear", "api", "--why", "better"), "api has no override any more")

		override := []string{"--window", "minute=50", "--weight", "2", "--for", "1h", "--why", "INC-7"}
		says(run(append([]string{"limits", "override", "api", "acme"}, override...)...),
			`tenant "acme" of api: minute 50, weight 2 until `)
		run("front", "api", "acme", "--for", "10m", "--why", "x").want(t, exitBadInput, `has an override by "anna" until `)
		run("limits", "override", "api", "acme", "--window", "pace=50", "--for", "1h", "--why", "x").want(t, exitBadInput, "does not count by tenant")
		run("limits", "override", "api", "acme", "--window", "minute=5", "--window", "minute=6", "--for", "1h", "--why", "x").
			want(t, exitBadInput, `--window "minute=6": must be a window and its limit, such as minute=50, and be there once`)
		run("limits", "override", "api", "acme", "--exempt", "maybe", "--for", "1h", "--why", "x").
			want(t, exitBadInput, "must be yes or no")
		run("limits", "override", "api", "acme", "--weight=-1", "--for", "1h", "--why", "x").want(t, exitBadInput, "weight -1: must be 0.001 to 1000000")
		run("limits", "override", "api", "acme", "--for", "1h", "--why", "x").want(t, exitBadInput, "needs --window, --weight or --exempt")
		run("limits", "override", "api", "acme", "--weight", "2", "--why", "x").want(t, exitBadInput, "--for 0s: must be given, such as 10m: above 0")
		says(run("pause", "api", "--for", "10m", "--why", "down"), "api is paused until ")
		says(run("pause", "api", "zeta", "--for", "10m", "--why", "asked"), `tenant "zeta" of api is paused until `)
		e := run("pause", "api", "zeta", "--for", "10m", "--why", "asked again", "--by", "ben")
		e.want(t, exitDone).says(t, ", instead of a pause until ", " by anna: asked\n")
		e = run(append([]string{"limits", "override", "api", "acme"}, override...)...)
		e.says(t, ", instead of minute 50, weight 2 until ")
		that(t, !strings.Contains(e.stderr, "warning"), e.stderr)
		run("pause", "api", "acne", "--for", "1ms", "--why", "x").want(t, exitDone,
			`warning: tenant "acne" of api has nothing that waits, and is not known to have been granted anything: is it spelt right?`)
		run("pause", "apo", "--for", "10m", "--why", "down").want(t, exitBadInput, `policy "apo": must be one of api`)
		run("pause", "--for", "10m", "--why", "down").want(t, exitBadInput, "pause needs the arguments POLICY [TENANT]")

		state := decoded[limitsInForce](t, look("limits", "show", "--json").want(t, exitDone))
		that(t, state.Version == 2 && len(state.Policies) == 1, state)
		contains(t, fmt.Sprint(state.Policies), "limit:30")
		require(t, len(state.Overrides) == 1 && len(state.Pauses) == 2, state)
		that(t, state.Overrides[0].Windows["minute"].Limit == 50 && state.Overrides[0].Author == "anna", state)
		equal(t, state.Pauses[1].Cause, "asked again")
		says(look("limits", "show", "api"), " anna ")
		look("limits", "show", "apo").want(t, exitBadInput, `policy "apo": nothing is published`)
		says(run("limits", "rollback", "--why", "too many"), "published version ")
		says(look("limits", "show"), "40")
		run("limits", "rollback", "--version", "77", "--why", "x").want(t, exitBadInput, "--version 77: the log has no policies of it")

		says(run("resume", "api", "acme", "--why", "up"), `tenant "acme" of api was not paused`)
		says(run("resume", "api", "--why", "up"), "api is not paused any more")
		says(run("limits", "clear", "api", "acme", "--why", "done"), `tenant "acme" of api has no override any more`)
		says(run("limits", "clear", "api", "acme", "--why", "done"), `had no override`)
		says(look("limits", "log"), "resume")
		e = look("limits", "log", "--json", "--last", "3").says(t, `"name": "pace"`, `"period": "1s"`)
		log := decoded[[]loggedChange](t, e)
		that(t, len(log) == 3 && log[0].Kind == "clear", log)
		// Tasks of two tenants wait behind a full window.
		asynqs := asynq.RedisClientOpt{Addr: client.Options().Addr}
		policies := valueOf(policyfile.Load(d.path("policies.yml")))(t)
		policies[0].Windows[1].Limit = 1
		limiter := valueOf(throttle.New(throttle.Config{Client: client, Logger: slog.New(slog.DiscardHandler), Policies: policies}))(t)
		tasks := valueOf(worker.NewClient(asynqs, worker.ClientConfig{Limiter: limiter, LimiterTimeout: time.Minute}))(t)
		defer tasks.Close()
		for i := range 6 {
			id := worker.Identity{Tenant: []string{"acme", "zeta"}[i%2]}
			must(t, errOf(tasks.EnqueueContext(t.Context(), worker.NewTask(id, "call", nil))))
			must(t, errOf(limiter.Reserve(t.Context(), throttle.Request{Policy: "api", Tenant: id.Tenant})))
		}
		wait := func() int64 {
			return valueOf(limiter.Line("api").Len(t.Context()))(t)
		}
		says(run("drop", "api", "acme"), `tenant "acme" of api: would archive 3 waiting tasks. Nothing is changed: --yes does it.`)
		equal(t, wait(), 6, "wait after a preview")
		run("pause", "api", "--for", "1h", "--why", strings.Repeat("x", 600)).want(t, exitBadInput, "must be 1 to")
		run("drop", "api", "acme", "--yes").want(t, exitBadInput, "--why is missing")
		run("drop", "api", "acne").want(t, exitDone, `did you mean "acme"?`)
		says(run("drop", "api", "acme", "--yes", "--why", "they left"), `tenant "acme" of api: archived 3 waiting tasks`)
		says(run("drop", "api", "acme", "--yes", "--why", "they left"), `archived 0 waiting tasks`)
		equal(t, wait(), 3, "wait after the tasks of one tenant were dropped")
		says(run("drop", "api", "zeta", "--delete", "--yes", "--policies", d.path("policies.yml"), "--why", "twice"), `deleted 3 waiting tasks`)
		inspector := asynq.NewInspector(asynqs)
		defer inspector.Close()
		info, err := inspector.GetQueueInfo("default")
		that(t, err == nil && info.Archived == 3 && info.Size == 3 && wait() == 0, "the queue is", info, err)
		run("drop", "api", "--why", "x").want(t, exitBadInput, "drop needs the arguments POLICY TENANT")

		must(t, errOf(limiter.Reserve(t.Context(), throttle.Request{Policy: "api", Tenant: "acme"})))
		says(run("reset", "api", "acme", "--why", "new key"), `tenant "acme" of api: emptied 1 count`)
		after, err := limiter.Peek(t.Context(), throttle.Request{Policy: "api", Tenant: "acme"})
		that(t, err == nil && after.Windows[1].Used == 0, after.Windows, err)
		says(run("reset", "api", "--why", "new quota"), `api: emptied `)
		run("reset", "apo", "--why", "x").want(t, exitBadInput, `policy "apo": must be one of api`)
		says(run("front", "api", "acme", "--for", "10m", "--why", "release"), `tenant "acme" of api goes before others until `)
		says(look("limits", "show"), "goes first")
		// Of a policy that was removed, what is in force can be ended.
		d.write("other.yml", strings.ReplaceAll(controlled, "name: api", "name: other"))
		says(run("limits", "publish", d.path("other.yml"), "--why", "renamed"), "published version ")
		says(run("limits", "set", "other", "pace", "--limit", "5", "--for", "2h", "--why", "x"), "other: pace 5 until ")
		says(run("limits", "set", "other", "pace", "--limit", "9", "--why", "x"), "; still in force for all tenants: pace 5 until ") // forgets api
		says(run("limits", "clear", "api", "acme", "--why", "gone"), `tenant "acme" of api has no override any more`)
		run("limits", "clear", "api", "acme", "--why", "x").want(t, exitBadInput, `policy "api": must be one of other`)
		// Policies that this program cannot read can be replaced, and others' pauses ended.
		says(run("pause", "other", "--for", "1h", "--why", "x"), "other is paused until ")
		must(t, client.HSet(t.Context(), "sluice:{!control}:state", "policies", `0 {"new": 1}`).Err())
		look("status").want(t, exitFailed, "published policies cannot be read")
		says(run("resume", "other", "--why", "x"), "other is not paused any more")
		says(run("limits", "publish", d.path("policies.yml"), "--why", "repair"), "published version ")
		runMain(t.Context(), "", "limits", "show").want(t, exitBadInput, "there is no Redis: --redis must be")
		runMain(t.Context(), "", "limits", "shoe").want(t, exitBadInput, `unknown command "shoe": did you mean "show"?`)
	})
}

// asynq keeps the newest archived tasks of a queue. What a drop would have it delete is said before.
func TestDropSaysWhatAsynqDoesNotKeep(t *testing.T) {
	t.Parallel()
	d := newLiveWorkspace(t, livePolicies)
	client := throttletest.Client(t, d.addr)
	tasks := valueOf(worker.NewClient(asynq.RedisClientOpt{Addr: d.addr}, worker.ClientConfig{Limiter: d.limiter, LimiterTimeout: time.Minute}))(t)
	defer tasks.Close()
	for range 4 { // one of them fits
		must(t, errOf(tasks.EnqueueContext(t.Context(), worker.NewTask(worker.Identity{Tenant: "acme"}, "call", nil))))
	}
	pipe := client.Pipeline()
	for i := range archiveKeeps - 1 {
		pipe.ZAdd(t.Context(), "asynq:{default}:archived", redis.Z{Score: float64(time.Now().Unix() - 60), Member: fmt.Sprint("old", i)})
		pipe.HSet(t.Context(), fmt.Sprint("asynq:{default}:t:old", i), "msg", "")
	}
	must(t, errOf(pipe.Exec(t.Context())))
	const warning = "asynq keeps 9999 archived tasks of a queue: of default it deletes 3 that are archived already, of any tenant, and 0 of these"
	d.run(t, "drop", "api", "acme").want(t, exitDone, warning)
	got := decoded[dropReport](t, d.run(t, "drop", "--json", "api", "acme"))
	that(t, !got.Changed && got.Count == 4 && len(got.Queues) == 1 && got.Queues[0].LostOld == 3, got)
	d.run(t, "drop", "--yes", "--by", "anna", "--why", "they left", "api", "acme").want(t, exitDone, warning)
	equal(t, client.ZCard(t.Context(), "asynq:{default}:archived").Val(), archiveKeeps, "asynq keeps")
	e := d.run(t, "drop", "--delete", "api", "acme").want(t, exitDone)
	that(t, !strings.Contains(e.stderr, "asynq keeps"), e.stderr)
}

// What operators have published is what the commands compute with; a file is a question.
func TestWhatIsInForceIsShown(t *testing.T) {
	t.Parallel()
	d := newLiveWorkspace(t, livePolicies) // its file, and its workers, grant 2 to all, and 1 to each
	look := d.look
	look("status").want(t, exitBadInput, "no policies are published: --policies must be the workers' policy file")
	look("doctor").want(t, exitDone)
	d.run(t, "status").says(t, "policies: "+d.path("policies.yml")+", as none are published\n")
	look("limits", "publish", d.path("policies.yml"), "--by", "anna", "--why", "x").want(t, exitDone)
	look("limits", "set", "api", "shared", "--limit", "7", "--by", "anna", "--why", "x").want(t, exitDone)
	look("status").want(t, exitDone).says(t, "policies: published version 2\n", " shared 0 7 requests ")
	d.run(t, "status").want(t, exitDone).says(t,
		"policies: as if "+d.path("policies.yml")+" were in force instead of published version 2\n", " shared 0 2 requests ")
	equal(t, decoded[simulated](t, look("simulate", "--limit", "shared=8", "--json")).Source, "published version 2")
	for _, ticket := range []string{"1", "w0", "w1"} {
		d.reserves(t, "acme", ticket)
	}
	look("limits", "override", "api", "acme", "--window", "own=1", "--for", "1h", "--by", "anna", "--why", "x").want(t, exitDone)
	got := decoded[simulated](t, look("simulate", "--limit", "own@acme=9", "--json"))
	that(t, got.Now.Expected.After(got.Now.At) && got.If.Expected.Equal(got.If.At), got)
}
