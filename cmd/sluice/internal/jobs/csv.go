package jobs

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"
)

// csvRecords hands out the records of a CSV file as the lines of JSON that say the same. The first
// record names the fields. headers.NAME is one header, cost.UNIT what a job takes of one unit. An
// empty cell is a field that is not there.
func csvRecords(name string, r io.Reader, do func(number int, line []byte, err error)) error {
	text, err := io.ReadAll(r)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	records := csv.NewReader(bytes.NewReader(bytes.TrimPrefix(text, []byte("\ufeff"))))
	columns, err := records.Read()
	if err == io.EOF {
		return nil
	}
	if err == nil {
		err = checkColumns(columns)
	}
	if err != nil {
		return fmt.Errorf("%s:1: %w", name, csvError(err))
	}
	for {
		record, err := records.Read()
		if err == io.EOF {
			return nil
		}
		number := 0
		if wrong := (*csv.ParseError)(nil); errors.As(err, &wrong) {
			number = wrong.StartLine
		} else if err == nil {
			number, _ = records.FieldPos(0)
		}
		var line []byte
		if err == nil {
			line, err = csvLine(columns, record)
		}
		do(number, line, csvError(err))
		if err != nil && !errors.Is(err, csv.ErrFieldCount) && !errors.Is(err, errNotText) {
			return nil // where the next record begins is not known
		}
	}
}

// csvError says what is wrong without the line, which the caller names.
func csvError(err error) error {
	var wrong *csv.ParseError
	if errors.As(err, &wrong) {
		return fmt.Errorf("is not CSV: %w: must have a value for each column, "+
			"with quotes around one that holds a quote, a comma or a line's end", wrong.Err)
	}
	return err
}

func checkColumns(columns []string) error {
	fields := Fields()
	var cost []string
	for i, column := range columns {
		field, part, inner := strings.Cut(column, ".")
		if slices.Index(columns, column) < i {
			return fmt.Errorf("column %q: is there twice: must be there once", column)
		}
		if !slices.Contains(fields, field) {
			return fmt.Errorf("unknown column %q: %s", Shorten(column), suggestField(field))
		}
		if inner && (part == "" || field != "headers" && field != "cost") || !inner && field == "headers" {
			return fmt.Errorf("column %q: must be a field, or such as headers.Accept or cost.tokens", Shorten(column))
		}
		if field == "cost" {
			cost = append(cost, column)
		}
	}
	if len(cost) > 1 && slices.Contains(cost, "cost") {
		return errors.New(`columns "cost" and "cost.UNIT": must not be there together`)
	}
	return nil
}

// number is what stands in JSON without quotes.
var number = regexp.MustCompile(`^-?(0|[1-9][0-9]*)$`)

var errNotText = errors.New("is not UTF-8: must be saved as UTF-8")

func csvLine(columns, record []string) ([]byte, error) {
	object := map[string]any{}
	for i, column := range columns {
		cell := record[i]
		if cell == "" {
			continue
		}
		if !utf8.ValidString(cell) {
			return nil, errNotText
		}
		field, part, inner := strings.Cut(column, ".")
		var value any = cell
		if (field == "cost" || field == "max_retry") && number.MatchString(cell) {
			value = json.RawMessage(cell)
		}
		if !inner {
			object[field] = value
			continue
		}
		parts, _ := object[field].(map[string]any)
		if parts == nil {
			parts = map[string]any{}
			object[field] = parts
		}
		parts[part] = value
	}
	return json.Marshal(object) // sorted by name: the same record has the same line
}
