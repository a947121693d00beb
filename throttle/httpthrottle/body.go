package httpthrottle

import (
	"context"
	"errors"
	"io"
	"net/http"

	"github.com/sluice-go/sluice/throttle"
)

// untilRead calls `end` when the response's body is read to its end or closed, or when reqCtx ends. After a protocol
// switch it calls `end` when the connection is closed, and closes that when holdCtx ends. It may call `end` repeatedly.
func untilRead(reqCtx, holdCtx context.Context, resp *http.Response, end func()) {
	conn, ok := resp.Body.(io.ReadWriteCloser)
	if ok && resp.StatusCode == http.StatusSwitchingProtocols { // http.Transport no longer watches the context
		stop := context.AfterFunc(holdCtx, func() { conn.Close(); end() })
		resp.Body = &duplex{conn, holdCtx, func() { stop(); end() }}
		return
	}
	if resp.Body == nil || resp.Body == http.NoBody {
		end()
		return
	}
	stop := context.AfterFunc(reqCtx, end)
	resp.Body = &body{resp.Body, holdCtx, func() { stop(); end() }}
}

// A body calls end when it is read to its end or closed.
type body struct {
	io.ReadCloser
	holdCtx context.Context
	end     func()
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		err = lost(b.holdCtx, err)
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
	io.ReadWriteCloser
	holdCtx context.Context
	end     func()
}

func (d *duplex) Read(p []byte) (int, error) {
	n, err := d.ReadWriteCloser.Read(p)
	return n, lost(d.holdCtx, err)
}

func (d *duplex) Write(p []byte) (int, error) {
	n, err := d.ReadWriteCloser.Write(p)
	return n, lost(d.holdCtx, err)
}

func (d *duplex) Close() error {
	defer d.end()
	return d.ReadWriteCloser.Close()
}

// CloseWrite ends what is written. Proxies such as httputil.ReverseProxy then read on.
func (d *duplex) CloseWrite() error {
	if w, ok := d.ReadWriteCloser.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return errors.ErrUnsupported
}

// lost returns the error of a call, joined with throttle.ErrLeaseLost if that ended the call: HTTP/2 hides the cause.
func lost(holdCtx context.Context, err error) error {
	cause := context.Cause(holdCtx)
	if err == nil || err == io.EOF || errors.Is(err, cause) || !errors.Is(cause, throttle.ErrLeaseLost) {
		return err
	}
	return errors.Join(err, cause)
}
