package alerts

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// An expected alert fires within two minutes of a time, and is over two and a half minutes after
// another.
type expected struct {
	alert     string
	from, end time.Duration
}

const (
	s      = time.Second
	minute = time.Minute
)

// The stories that scripts/drill records, and what has to fire.
var stories = map[string][]expected{
	"redis": {
		{`SluiceRedisDown{job="workers", redis="limiter"}`, time.Minute, 87 * s},
		{`SluiceRedisDown{job="workers", redis="queues"}`, time.Minute, 87 * s},
		{`SluiceRedisDown{job="workers", redis="limiter"}`, 5 * minute, 5*minute + 44*s},
		{`SluiceRedisDown{job="workers", redis="queues"}`, 5 * minute, 5*minute + 44*s},
		{`SluiceRedisDown{job="workers", redis="limiter"}`, 10 * minute, 15 * minute},
		{`SluiceRedisDown{job="workers", redis="queues"}`, 10 * minute, 15 * minute},
	},
	"starving": {{`SluiceTenantStarves{job="workers", policy="api"}`, 90 * s, 320 * s}},
	"backlog":  {{`SluiceBacklogStands{job="workers", policy="api"}`, 2 * minute, 6 * minute}},
	"workers":  {{`SluiceNoServer{job="workers", policy="api", queue="default"}`, time.Minute, time.Hour}},
}

// Each alert fires within two minutes when it is meant to, whenever Prometheus scrapes, and only then.
func TestAlertsFireWhenTheyAreMeantTo(t *testing.T) {
	t.Parallel()
	for story, want := range stories {
		all := load(t, "testdata/"+story+".gz")
		for _, phase := range []time.Duration{0, 5 * s, 10 * s} {
			t.Run(fmt.Sprint(story, "/", phase), func(t *testing.T) {
				t.Parallel()
				got := fired(t, rules(t), all.every(15*s, phase))
				var text []string
				for _, f := range got {
					text = append(text, fmt.Sprintf("%s from %v to %v", f.alert, f.from, f.to))
				}
				ok := len(got) == len(want)
				for _, want := range want {
					found := false
					for _, f := range got {
						found = found || f.alert == want.alert && f.from > want.from && f.from <= want.from+2*minute &&
							(want.end == time.Hour || f.to > want.end && f.to <= want.end+150*s)
					}
					ok = ok && found
				}
				if !ok {
					t.Errorf("fired:\n%s\nwant %v", strings.Join(text, "\n"), want)
				}
			})
		}
	}
}
