package show_test

import (
	"strings"
	"testing"

	"github.com/rivo/uniseg"

	"github.com/sluice-go/sluice/cmd/sluice/internal/show"
	"github.com/sluice-go/sluice/internal/testhook/expect"
)

func TestATableFitsTheTerminal(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	table := show.NewTable(&b, "TENANT", "WAITING", "WINDOWS")
	table.Width = 60
	for _, name := range []string{"acme", strings.Repeat("x", 512), strings.Repeat("漢", 200), "a\nb\tc", "\x1b[31mred\u202e"} {
		table.Row(name, 12, "per-minute 75/300, "+strings.Repeat("burst 1/5, ", 9)+"end")
	}
	table.Flush()
	lines := strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
	expect.That(t, len(lines) == 6 && !strings.ContainsAny(b.String(), "\t\x1b\u202e"), len(lines), "lines:", b.String())
	for _, line := range lines {
		n := uniseg.StringWidth(line)
		expect.That(t, n <= 60, n, "columns:", line)
		at := strings.Index(line, "12   per-minute")
		expect.That(t, at < 0 || uniseg.StringWidth(line[:at]) == uniseg.StringWidth(lines[1][:strings.Index(lines[1], "12   per")]), "is not aligned", line)
	}
	b.Reset()
	table = show.NewTable(&b, "TENANT")
	table.Row(strings.Repeat("x", 512))
	table.Flush()
	expect.That(t, strings.Contains(b.String(), strings.Repeat("x", 512)+"\n"), "a file is cut like a terminal")
}
