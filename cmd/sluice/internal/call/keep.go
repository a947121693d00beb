package call

import (
	"bytes"
	"io"
	"net/http"
	"unicode/utf8"

	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
)

// MaxKeptBody bounds how much of a body can be kept. It is also how much of one is read, so that its
// connection can be used again.
const MaxKeptBody = 1 << 20

// keep reads an answer to its end, or to MaxKeptBody, and returns so many bytes of it.
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
