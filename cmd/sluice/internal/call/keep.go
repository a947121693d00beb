package call

import (
	"bytes"
	"io"
	"net/http"
	"strings"
	"unicode/utf8"

	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
)

// MaxKeptBody bounds how much of a body can be kept. It is also how much of one is read, so that its
// connection can be used again.
const MaxKeptBody = 1 << 20

// Keep says what of an answer goes into the result.
type Keep struct {
	Body    int      // bytes at most, up to MaxKeptBody; 0 for none
	Headers []string // by name; "all" for all of them
	Time    bool     // how long the call took
}

// of reads the answer to its end, or to MaxKeptBody.
func (k Keep) of(res *http.Response) (jobs.Answer, error) {
	var a jobs.Answer
	for _, name := range k.Headers {
		if strings.EqualFold(name, "all") {
			a.Headers = res.Header.Clone()
			break
		}
		if values := res.Header.Values(name); len(values) > 0 {
			if a.Headers == nil {
				a.Headers = map[string][]string{}
			}
			a.Headers[http.CanonicalHeaderKey(name)] = values
		}
	}
	var body bytes.Buffer
	if _, err := io.CopyN(&body, res.Body, int64(k.Body)); err != nil && err != io.EOF {
		return a, err
	}
	rest, err := io.CopyN(io.Discard, res.Body, int64(MaxKeptBody-k.Body+1))
	if err != nil && err != io.EOF {
		return a, err
	}
	if k.Body > 0 {
		a.BodyCut = rest > 0
		a.Body, a.BodyBase64 = text(body.Bytes(), a.BodyCut)
	}
	return a, nil
}

// text is a body that is UTF-8, without half of a character where it was cut; other bodies are bytes.
func text(body []byte, cut bool) (string, []byte) {
	whole := body
	if cut {
		last := max(0, len(body)-1)
		for last > 0 && len(body)-last < utf8.UTFMax && !utf8.RuneStart(body[last]) {
			last--
		}
		if !utf8.FullRune(body[last:]) {
			whole = body[:last]
		}
	}
	if utf8.Valid(whole) {
		return string(whole), nil
	}
	return "", body
}
