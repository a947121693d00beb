package alerts

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// Each alert fires within two minutes when it is meant to, whenever Prometheus scrapes, and only then.
func TestAlertsFireWhenTheyAreMeantTo(t *testing.T) {
	t.Parallel()
	for _, story := range stories {
		all := load(t, recorded(story.name))
		for _, phase := range []time.Duration{0, 5 * s, 10 * s} {
			t.Run(fmt.Sprint(story.name, "/", phase), func(t *testing.T) {
				t.Parallel()
				got := fired(t, rules(t), all.every(15*s, phase))
				var text []string
				for _, f := range got {
					text = append(text, fmt.Sprintf("%s from %v to %v", f.alert, f.from, f.to))
				}
				ok := len(got) == len(story.want)
				for _, want := range story.want {
					found := false
					for _, f := range got {
						found = found || f.alert == want.alert && f.from > want.from && f.from <= want.from+2*minute &&
							(want.end == time.Hour || f.to > want.end && f.to <= want.end+150*s)
					}
					ok = ok && found
				}
				if !ok {
					t.Errorf("fired:\n%s\nwant %v", strings.Join(text, "\n"), story.want)
				}
			})
		}
	}
}
