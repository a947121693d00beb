package call

import (
	"bytes"
	"io"
	"net/http"
	"unicode/utf8"

	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
)

// MaxKeptBody is the most of a body, in bytes, that can be kept. Up to there a body is read even if it is not kept, as
// only then its connection can be used again.
const MaxKeptBody = 1 << 20

// keep reads an answer's body to its end, or to MaxKeptBody, and returns an Answer with up to bytesKept of it.
func keep(res *http.Response, bytesKept int) (a jobs.Answer, err error) {
	var body bytes.Buffer
	if _, err := io.CopyN(&body, res.Body, int64(bytesKept)); err != nil && err != io.EOF {
		return a, err
	}
	rest, err := io.CopyN(io.Discard, res.Body, int64(MaxKeptBody-bytesKept+1))
	if err != nil && err != io.EOF {
		return a, err
	}
	if bytesKept > 0 {
		a.BodyCut = rest > 0
		a.Body, a.BodyBase64 = text(body.Bytes(), a.BodyCut)
	}
	return a, nil
}

// text returns a body as text if it is UTF-8, without a character that was cut at its end, and else as bytes.
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
