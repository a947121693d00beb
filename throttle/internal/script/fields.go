package script

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"
)

// A field is a field of a Request or an Answer that calls carry by its name, its tag: "name=12" is a
// number, "name:text" a text, and blanks separate them. Zero values are left out. lua/codec.lua
// reads and writes them there.
type field struct {
	name    string // empty for a struct
	index   int
	escaped bool // it is data
	fields  []field
}

var (
	requestFields = fieldsOf(reflect.TypeFor[Request]())
	answerFields  = fieldsOf(reflect.TypeFor[Answer]())
)

// fieldsOf returns the fields of a struct that have a tag, and the structs with such fields.
func fieldsOf(t reflect.Type) (fields []field) {
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	for i := 0; t.Kind() == reflect.Struct && i < t.NumField(); i++ {
		f := field{index: i}
		if f.name = t.Field(i).Tag.Get("lua"); f.name == "" {
			f.fields = fieldsOf(t.Field(i).Type)
		}
		if f.name, f.escaped = strings.CutSuffix(f.name, ",escaped"); f.name != "" || f.fields != nil {
			fields = append(fields, f)
		}
	}
	return fields
}

// appendFields writes the fields of a struct.
func appendFields(text []byte, v reflect.Value, fields []field) []byte {
	for i := range fields {
		f, value := &fields[i], v.Field(fields[i].index)
		switch {
		case value.IsZero():
		case f.fields != nil:
			text = appendFields(text, reflect.Indirect(value), f.fields)
		case value.CanInt():
			text = append(strconv.AppendInt(append(append(text, f.name...), '='), value.Int(), 10), ' ')
		case value.Kind() == reflect.Bool:
			text = append(append(text, f.name...), "=1 "...)
		case f.escaped:
			text = append(append(append(append(text, f.name...), ':'), Escape(value.String())...), ' ')
		default:
			list := strings.ReplaceAll(fmt.Sprint(value), " ", ",")
			text = append(append(append(append(text, f.name...), ':'), list...), ' ')
		}
	}
	return text
}

// setField sets a field of a struct. It returns whether there is such a field, with such a value.
func setField(v reflect.Value, fields []field, name, text string) (ok bool) {
	for i := range fields {
		f, value := &fields[i], v.Field(fields[i].index)
		switch {
		case f.fields != nil && setField(value, f.fields, name, text):
			return true
		case f.name != name:
		case value.CanInt():
			n, err := strconv.ParseInt(text, 10, 64)
			value.SetInt(n)
			return err == nil
		case value.Kind() == reflect.Bool:
			value.SetBool(text == "1")
			return true
		case value.Kind() == reflect.String:
			value.SetString(Unescape(text))
			return true
		default:
			numbers, ok := integers(text)
			value.Set(reflect.ValueOf(numbers))
			return ok
		}
	}
	return false
}

// integers reads a list by commas.
func integers(list string) (numbers []int64, ok bool) {
	for word := range strings.SplitSeq(list, ",") {
		n, err := strconv.ParseInt(word, 10, 64)
		if err != nil {
			return nil, false
		}
		numbers = append(numbers, n)
	}
	return numbers, true
}

// read reads the fields of an answer.
func (a *Answer) read(text string) (ok bool) {
	v := reflect.ValueOf(a).Elem()
	ok = true
	for field := range strings.FieldsSeq(text) {
		i := strings.IndexAny(field, "=:")
		ok = ok && i > 0 && setField(v, answerFields, field[:i], field[i+1:])
	}
	return ok
}
