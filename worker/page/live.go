package page

import (
	"fmt"
	"net/http"
	"strings"
	"time"
)

const (
	maxViewers = 100 // browsers that follow the page at the same time
	liveEvery  = 2 * time.Second
	liveFor    = 10 * time.Minute // after which the browser connects again
	quietFor   = 15 * time.Second // after which a comment keeps the connection alive
	writeFor   = 10 * time.Second // for a browser to read
)

// live sends the page's content whenever it has changed, as server-sent events.
func (p *Page) live(w http.ResponseWriter, r *http.Request) {
	select {
	case p.viewers <- struct{}{}: // there is a place for one more
		defer func() { <-p.viewers }()
	default:
		w.Header().Set("Retry-After", "30")
		http.Error(w, fmt.Sprintf("%d follow the page already: load it again to see news", maxViewers), http.StatusServiceUnavailable)
		return
	}
	out := http.NewResponseController(w)
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no") // of nginx, which would delay events
	send := func(text string) bool {
		_ = out.SetWriteDeadline(time.Now().Add(writeFor)) // not every ResponseWriter can
		defer out.SetWriteDeadline(time.Time{})            // in HTTP/2 a deadline would end a quiet stream
		_, err := w.Write([]byte(text))
		return err == nil && out.Flush() == nil
	}
	if !send("retry: 3000\n\n") {
		return
	}
	q, s := questionOf(r), p.sessionOf(r)
	tick := time.NewTicker(liveEvery)
	defer tick.Stop()
	end := time.After(liveFor)
	previous, sent := "", time.Now()
	for {
		v := p.view(r.Context(), q, s)
		if s != nil && s.Until.Before(v.At) {
			return // the browser's next request is not signed in
		}
		v.Notice = ""
		var text strings.Builder
		if err := templates.ExecuteTemplate(&text, "content.html", v); err != nil {
			p.config.Logger.Error("page: its news cannot be made", "err", err)
			return
		}
		switch now := text.String(); {
		case now != previous:
			if !send("data: " + strings.ReplaceAll(now, "\n", "\ndata: ") + "\n\n") {
				return
			}
			previous, sent = now, time.Now()
		case time.Since(sent) > quietFor:
			if !send(": nothing new\n\n") {
				return
			}
			sent = time.Now()
		}
		select {
		case <-tick.C:
		case <-end:
			return
		case <-r.Context().Done():
			return
		}
	}
}
