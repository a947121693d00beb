package policyfile

import (
	"fmt"
	"slices"
	"unicode/utf8"

	"github.com/sluice-go/sluice/throttle/internal/quote"
	"go.yaml.in/yaml/v4"
)

// checkCharacters returns whether YAML allows every character of the file. It reports the first one that YAML does not
// allow, because the YAML library does not know its line.
func (d *decoder) checkCharacters(data []byte) bool {
	line := 1
	for rest := data; len(rest) > 0; {
		r, size := utf8.DecodeRune(rest)
		switch {
		case r == utf8.RuneError && size == 1:
			d.report(line, "", fmt.Sprintf("byte 0x%02X", rest[0]), "must be UTF-8: save the file in that encoding")
			return false
		case r == '\n':
			line++
		case r < ' ' && r != '\t' && r != '\r', r >= 0x80 && r < 0xA0 && r != 0x85, r == 0xFFFE, r == 0xFFFF:
			escape := fmt.Sprintf(`\x%02X`, r)
			if r > 0xFF {
				escape = fmt.Sprintf(`\u%04X`, r)
			}
			d.report(line, "", fmt.Sprintf("character %U", r),
				"must not be in a file: delete it, or write "+escape+" between double quotes")
			return false
		}
		rest = rest[size:]
	}
	return true
}

// checkAliases returns whether no alias refers to itself, and the file is small enough with every alias written out.
// Otherwise it reports the line.
func (d *decoder) checkAliases(root *yaml.Node) bool {
	left, open := maxNodes, map[*yaml.Node]bool{}
	var walk func(n *yaml.Node) bool
	walk = func(written *yaml.Node) bool {
		n := follow(written)
		if open[n] {
			d.report(written.Line, "", "alias *"+quote.Short(written.Value),
				fmt.Sprintf("must not refer to itself: &%s is on line %d", quote.Short(written.Value), n.Line))
			return false
		}
		if left--; left < 0 {
			d.report(written.Line, "", "file is too large",
				fmt.Sprintf("must have at most %d values, with every alias written out", maxNodes))
			return false
		}
		open[n] = true
		defer delete(open, n)
		return !slices.ContainsFunc(n.Content, func(inner *yaml.Node) bool { return !walk(inner) })
	}
	return walk(root)
}
