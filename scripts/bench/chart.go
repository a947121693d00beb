package main

import (
	"fmt"
	"io"
	"math"
	"strings"
)

// A curve shows how one figure grows with another.
type curve struct {
	Name   string // of its file
	Title  string
	X, Y   string  // what the axes say
	Points []point // in the order of x, which is above 0
}

type point struct{ X, Y float64 }

// The size of the picture in pixels, and of the plot in it.
const (
	chartWidth, chartHeight      = 560, 300
	fieldLeft, fieldRight        = 56, 536
	fieldTop, fieldBottom        = 48, 248
	chartLine, chartText, chartY = "#2b6cb0", "#57606a", "#d0d7de"
)

// svg draws the curve: x on a logarithmic axis, y from 0.
func (c curve) svg(w io.Writer) error {
	most := 0.
	for _, p := range c.Points {
		most = max(most, p.Y)
	}
	spacing := niceSpacing(most / 4) // of the lines of the grid
	top := spacing * math.Max(1, math.Ceil(most/spacing))
	first, last := math.Log(c.Points[0].X), math.Log(c.Points[len(c.Points)-1].X)
	x := func(v float64) float64 {
		return fieldLeft + (fieldRight-fieldLeft)*(math.Log(v)-first)/max(last-first, 1e-9)
	}
	y := func(v float64) float64 { return fieldBottom - (fieldBottom-fieldTop)*v/top }

	var b strings.Builder
	draw := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	text := func(x, y float64, anchor string, size int, s string) {
		draw(`<text x="%.1f" y="%.1f" text-anchor="%s" font-size="%d" fill="%s">%s</text>`,
			x, y, anchor, size, chartText, escapeXML(s))
	}
	draw(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" `+
		`font-family="system-ui, sans-serif">`, chartWidth, chartHeight, chartWidth, chartHeight)
	draw(`<rect width="%d" height="%d" fill="#ffffff"/>`, chartWidth, chartHeight)
	text(fieldLeft, 20, "start", 14, c.Title)
	text(fieldLeft, 38, "start", 11, c.Y)
	for i := 0; float64(i)*spacing <= top*1.001; i++ {
		v := float64(i) * spacing
		draw(`<line x1="%d" y1="%.1f" x2="%d" y2="%.1f" stroke="%s"/>`, fieldLeft, y(v), fieldRight, y(v), chartY)
		text(fieldLeft-6, y(v)+4, "end", 11, shortNumber(v))
	}
	var line []string
	for _, p := range c.Points {
		line = append(line, fmt.Sprintf("%.1f,%.1f", x(p.X), y(p.Y)))
		text(x(p.X), fieldBottom+18, "middle", 11, shortNumber(p.X))
	}
	draw(`<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/>`, strings.Join(line, " "), chartLine)
	for _, p := range c.Points {
		draw(`<circle cx="%.1f" cy="%.1f" r="3.5" fill="%s"/>`, x(p.X), y(p.Y), chartLine)
		text(x(p.X), y(p.Y)-9, "middle", 11, shortNumber(p.Y))
	}
	text((fieldLeft+fieldRight)/2, chartHeight-12, "middle", 12, c.X)
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

// niceSpacing returns the next 1, 2 or 5 times a power of ten.
func niceSpacing(least float64) float64 {
	if least <= 0 {
		return 1
	}
	power := math.Pow(10, math.Floor(math.Log10(least)))
	for _, times := range []float64{1, 2, 5} {
		if times*power >= least {
			return times * power
		}
	}
	return 10 * power
}

// shortNumber formats 1,500 as 1.5k, and a ratio with at most two decimals.
func shortNumber(v float64) string {
	switch {
	case v >= 1e6:
		return fmt.Sprintf("%.4gM", v/1e6)
	case v >= 1e3:
		return fmt.Sprintf("%.4gk", v/1e3)
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	}
	return strings.TrimSuffix(strings.TrimRight(fmt.Sprintf("%.2f", v), "0"), ".")
}

func escapeXML(s string) string {
	return strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;").Replace(s)
}
