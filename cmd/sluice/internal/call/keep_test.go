package call

import (
	"io"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
	"github.com/sluice-go/sluice/internal/testhook/expect"
)

func TestBodiesAreKeptAsAskedFor(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		keep int
		body string
		want jobs.Answer
	}{
		{"nothing", 0, "hello", jobs.Answer{}},
		{"all of a body", 5, "hello", jobs.Answer{Body: "hello"}},
		{"a part", 4, "hello", jobs.Answer{Body: "hell", BodyCut: true}},
		{"no half of a character", 3, "né\u00e9!", jobs.Answer{Body: "né", BodyCut: true}},
		{"no half of a wide one", 4, "n\U0001F600!", jobs.Answer{Body: "n", BodyCut: true}},
		{"no text", 9, "a\xff\xfe", jobs.Answer{BodyBase64: []byte("a\xff\xfe")}},
		{"a part of no text", 3, "\xffaaa", jobs.Answer{BodyBase64: []byte("\xffaa"), BodyCut: true}},
		{"the largest", MaxKeptBody, strings.Repeat("x", MaxKeptBody+1),
			jobs.Answer{Body: strings.Repeat("x", MaxKeptBody), BodyCut: true}},
	} {
		got, err := keep(&http.Response{Body: io.NopCloser(strings.NewReader(c.body))}, c.keep)
		expect.That(t, err == nil && reflect.DeepEqual(got, c.want), c.name, err, "got", got.Body)
	}
}
