package call

import (
	"io"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
)

func TestHeadersAndBodiesAreKeptAsAskedFor(t *testing.T) {
	t.Parallel()
	headers := http.Header{"Etag": {"x"}, "Set-Cookie": {"a=1", "b=2"}}
	for _, c := range []struct {
		name string
		keep Keep
		body string
		want jobs.Answer
	}{
		{"nothing", Keep{}, "hello", jobs.Answer{}},
		{"all of a body", Keep{Body: 5}, "hello", jobs.Answer{Body: "hello"}},
		{"a part", Keep{Body: 4}, "hello", jobs.Answer{Body: "hell", BodyCut: true}},
		{"no half of a character", Keep{Body: 3}, "né\u00e9!", jobs.Answer{Body: "né", BodyCut: true}},
		{"no half of a wide one", Keep{Body: 4}, "n\U0001F600!", jobs.Answer{Body: "n", BodyCut: true}},
		{"no text", Keep{Body: 9}, "a\xff\xfe", jobs.Answer{BodyBase64: []byte("a\xff\xfe")}},
		{"a part of no text", Keep{Body: 3}, "\xffaaa", jobs.Answer{BodyBase64: []byte("\xffaa"), BodyCut: true}},
		{"the largest", Keep{Body: MaxKeptBody}, strings.Repeat("x", MaxKeptBody+1),
			jobs.Answer{Body: strings.Repeat("x", MaxKeptBody), BodyCut: true}},
		{"one header", Keep{Headers: []string{"etag", "none"}}, "", jobs.Answer{Headers: map[string][]string{"Etag": {"x"}}}},
		{"all headers", Keep{Headers: []string{"all"}}, "", jobs.Answer{Headers: headers}},
	} {
		got, err := c.keep.of(&http.Response{Header: headers, Body: io.NopCloser(strings.NewReader(c.body))})
		if err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %v, got %.200s", c.name, err, got.Body)
		}
	}
}
