package httpthrottle

import (
	"context"
	"io"
	"net/http"
)

// untilRead calls end when the response's body is read to its end or closed, or the context ends.
// It may call end several times.
func untilRead(ctx context.Context, resp *http.Response, end func()) {
	if resp.Body == nil || resp.Body == http.NoBody {
		end()
		return
	}
	stop := context.AfterFunc(ctx, end)
	b := body{resp.Body, func() { stop(); end() }}
	if w, ok := resp.Body.(io.Writer); ok {
		resp.Body = &duplex{b, w}
	} else {
		resp.Body = &b
	}
}

// A body calls end when it is read to its end or closed.
type body struct {
	io.ReadCloser
	end func()
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		b.end()
	}
	return n, err
}

func (b *body) Close() error {
	defer b.end()
	return b.ReadCloser.Close()
}

// A duplex is the body of a response that switched protocols. It can be written to.
type duplex struct {
	body
	io.Writer
}
