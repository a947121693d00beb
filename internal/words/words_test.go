package words_test

import (
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/internal/words"
)

func TestSpansAreThoseOfPeople(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		-time.Second: "0s", 847 * time.Millisecond: "847ms", 2340 * time.Millisecond: "2.3s", time.Minute: "1m",
		94 * time.Second: "1m34s", 3*time.Hour + 59*time.Second: "3h", 26*time.Hour + time.Minute: "1d2h", 299063 * time.Hour: "34y50d",
	} {
		expect.Equal(t, words.Span(d), want, d, "is")
	}
}
