package throttle

import (
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// An Observed is what a policy would have done that only observes: see ModeObserve.
type Observed struct {
	By        string        // the window that would have denied for longest
	NeverFits bool          // the cost is above the window's limit: the request would have failed
	Wait      time.Duration // how long the request would have waited; 0 if NeverFits
}

// observed returns the windows by which a policy counts that only observes. A denied request would
// be charged later than now. Windows that forget what is over the limit cannot show that. As GCRA
// windows they are virtual queues, which drain at the rate of the limit.
func observed(windows []Window) []Window {
	out := make([]Window, len(windows))
	for i, w := range windows {
		if algorithms[w.Algorithm].ForgetsExcess {
			w.Algorithm, w.Anchor, w.Burst = AlgorithmGCRA, "", w.Limit
		}
		out[i] = w
	}
	return out
}

// observed returns what would have become of the request, nil if it was granted anyway.
func (o *operation) observed(a script.Answer) *Observed {
	if i := o.neverFits(); i >= 0 {
		return &Observed{By: o.windows[i].Name, NeverFits: true}
	}
	if a.Time <= a.At {
		return nil
	}
	would, longest := &Observed{By: ByPause, Wait: micros(a.Time - a.At)}, a.At
	for i, w := range a.Windows {
		if w.Fits > longest {
			would.By, longest = o.windows[i].Name, w.Fits
		}
	}
	return would
}
