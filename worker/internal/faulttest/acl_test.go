package faulttest

import (
	"errors"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	limits "github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// usersOfDocs returns the users that the docs create, by their names: the words of ACL SETUSER.
func usersOfDocs(t *testing.T) map[string][]string {
	t.Helper()
	text := expect.Got(os.ReadFile("../../../docs/howto/lock-down-redis.md"))(t)
	users := map[string][]string{}
	for _, user := range regexp.MustCompile(`(?m)^ACL SETUSER (.*\\\n)*.*$`).FindAllString(string(text), -1) {
		words := strings.Fields(strings.ReplaceAll(user, "\\\n", " "))
		users[words[2]] = words
	}
	return users
}

// commandsOfScripts returns the commands that our scripts call.
func commandsOfScripts(t *testing.T, dirs ...string) map[string]bool {
	t.Helper()
	commands := map[string]bool{}
	for _, dir := range dirs {
		files := expect.Got(os.ReadDir(dir))(t)
		for _, file := range files {
			text := expect.Got(os.ReadFile(dir + "/" + file.Name()))(t)
			for _, call := range regexp.MustCompile(`(?:redis\.p?call|call_in_parts)\('(\w+)'`).FindAllStringSubmatch(string(text), -1) {
				commands[strings.ToLower(call[1])] = true
			}
		}
	}
	return commands
}

// Each role does its work by the user that the docs give it, and Redis refuses nothing. What the
// user may call is called by the role, or by one of our scripts.
func TestARoleNeedsNoMoreThanItsUser(t *testing.T) {
	t.Parallel()
	users := usersOfDocs(t)
	limiter := commandsOfScripts(t, "../../../throttle/internal/script/lua")
	both := commandsOfScripts(t, "../../../throttle/internal/script/lua", "../asynqredis/lua")
	for _, role := range []struct {
		user    string
		scripts map[string]bool
		without string // a command to forbid beyond the docs
		work    func(s *sitetest.Site)
	}{
		{"sluice-limiter", limiter, "", workOfLimiter},
		{"sluice-client", both, "", workOfClient},
		{"sluice-worker", both, "", workOfWorker},
		{"sluice-worker", both, "blpop", workOfWorker},
		{"sluice-operator", limiter, "", workOfOperator},
	} {
		t.Run(role.user+" without "+role.without, func(t *testing.T) {
			t.Parallel()
			var args []string
			for _, command := range []string{"FLUSHALL", "FLUSHDB", "KEYS", "DEBUG"} {
				args = append(args, "--rename-command", command, "")
			}
			admin := throttletest.Client(t, throttletest.Redis(t, args...))
			user, ok := users[role.user]
			expect.Require(t, ok, "the docs have no user", role.user)
			setUser(t, admin, user)
			if role.without != "" {
				setUser(t, admin, []string{"ACL", "SETUSER", role.user, "-" + role.without})
			}
			expect.Must(t, admin.ConfigResetStat(t.Context()).Err())
			as := sitetest.SameRedis(admin)
			as.Username, as.Password = role.user, "SECRET"
			client := redis.NewClient(as)
			defer client.Close()
			s := sitetest.New(t, client, everyAlgorithm())
			s.Asynq, s.Redis = sitetest.Dialed{Options: as}, admin
			role.work(s)
			wantRefused(t, admin, role.without)
			called := commandsCalled(t, admin)
			for _, word := range user {
				command, allowed := strings.CutPrefix(word, "+")
				expect.That(t, !allowed || command == role.without || role.scripts[command] || called[command], role.user, "may call", command, "and need not")
			}
		})
	}
}

func setUser(t *testing.T, admin *redis.Client, words []string) {
	t.Helper()
	args := make([]any, len(words))
	for i, word := range words {
		args[i] = word
	}
	expect.Must(t, admin.Do(t.Context(), args...).Err())
}

// wantRefused fails if Redis refused anything but that command. go-redis ignores that it may not introduce itself.
func wantRefused(t *testing.T, admin *redis.Client, command string) {
	t.Helper()
	log := expect.Got(admin.ACLLog(t.Context(), 100).Result())(t)
	refused := false
	for _, entry := range log {
		object := strings.ToLower(entry.Object)
		refused = refused || object == command
		expect.That(t, object == command || strings.HasPrefix(object, "client|") || object == "info",
			"refused:", entry.Reason, entry.Object, entry.Context)
	}
	expect.That(t, command == "" || refused, command, "was not called")
}

// commandsCalled returns the commands that Redis has run, also in scripts.
func commandsCalled(t *testing.T, admin *redis.Client) map[string]bool {
	t.Helper()
	text := expect.Got(admin.Info(t.Context(), "commandstats").Result())(t)
	called := map[string]bool{}
	for _, stat := range regexp.MustCompile(`cmdstat_(\S+?):calls=`).FindAllStringSubmatch(text, -1) {
		called[stat[1]] = true
	}
	return called
}

// everyAlgorithm is a policy over every task type, with a window of each kind.
func everyAlgorithm() throttle.Policy {
	return throttle.Policy{
		Name: "api", Match: []string{"*"},
		Windows: []throttle.Window{
			{Name: "sliding", Limit: 4, Period: 200 * time.Millisecond},
			{Name: "fixed", Algorithm: throttle.AlgorithmFixed, Limit: 100, Period: time.Minute, Shared: true},
			{Name: "gcra", Algorithm: throttle.AlgorithmGCRA, Limit: 1000, Period: time.Minute, Burst: 1000, Shared: true},
			{Name: "slots", Algorithm: throttle.AlgorithmConcurrency, Limit: 3, Shared: true},
			{Name: "calendar", Algorithm: throttle.AlgorithmCalendar, Limit: 1000, Resets: "@daily", Shared: true},
		},
	}
}

// store is that of the site, by its user.
func store(s *sitetest.Site) *limits.Store { return limits.StoreOf(s.Limiter) }

// follows has the limiter follow what is published.
func follows(s *sitetest.Site) {
	s.Helper()
	f := store(s).Follow(s.Context(), limits.FollowConfig{})
	s.Cleanup(func() { f.Close() })
}

// A ping asks both Redises. A refused user of the limiter's is logged as such, and work goes on once it is let in.
func TestARefusedUserIsTold(t *testing.T) {
	s, admin := sitetest.OnRedis(t, sitetest.Policy(100, time.Hour)), throttletest.Client(t, throttletest.Redis(t))
	expect.Must(t, admin.Do(t.Context(), "acl", "setuser", "half", "on", "nopass", "~*", "+@all", "-set").Err())
	limits := redis.NewClient(&redis.Options{Addr: admin.Options().Addr, Username: "half", Password: "any"})
	defer limits.Close()
	s.Limiter = s.LimiterOn(limits)
	server, client := s.Serve(s.Ok), s.Client(s.Limiter)
	for _, ping := range []func() error{server.Ping, client.Ping} {
		err := ping()
		expect.That(t, errors.Is(err, throttle.ErrForbidden) && strings.Contains(err.Error(), "may not call set"), err)
	}
	s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("a"))
	s.Wait("it is logged", func() bool {
		return s.Logs.Count("worker: the limiter is unavailable") > 0 && s.Logs.Count(throttle.ErrForbidden.Error()) > 0
	})
	expect.Must(t, admin.Do(t.Context(), "acl", "setuser", "half", "+set").Err())
	s.WaitGone("a")
	err := server.Ping()
	expect.That(t, err == nil, err)
}
