package script

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// A field is a field of a Request or an Answer that calls carry by its name, its tag: "name=12" is a
// number, "name:text" a text, and blanks separate them. What is zero is left out. lua/decide.lua lists
// the fields, and lua/codec.lua reads and writes them there.
type field struct {
	name    string
	index   []int
	escaped bool // it is data
}

var (
	requestFields = fieldsOf(reflect.TypeFor[Request]())
	answerFields  = fieldsOf(reflect.TypeFor[Answer]())
)

// fieldsOf returns the fields of a struct that have a tag, and those of the structs in it.
func fieldsOf(t reflect.Type, index ...int) (fields []field) {
	for i := range t.NumField() {
		f, index := t.Field(i), append(slices.Clone(index), i)
		if f.Type.Kind() == reflect.Pointer {
			f.Type = f.Type.Elem()
		}
		name, option, tagged := strings.Cut(f.Tag.Get("lua"), ",")
		switch {
		case name != "":
			fields = append(fields, field{name, index, tagged && option == "escaped"})
		case f.Type.Kind() == reflect.Struct:
			fields = append(fields, fieldsOf(f.Type, index...)...)
		}
	}
	return fields
}

// fields writes the fields of a request.
func (r *Request) fields() string {
	var text []byte
	v := reflect.ValueOf(r).Elem()
	for _, f := range requestFields {
		value, err := v.FieldByIndexErr(f.index)
		if err != nil || value.IsZero() { // of a place that there is not
			continue
		}
		text = append(text, f.name...)
		switch {
		case value.CanInt():
			text = strconv.AppendInt(append(text, '='), value.Int(), 10)
		case value.Kind() == reflect.Bool:
			text = append(text, "=1"...)
		case f.escaped:
			text = append(append(text, ':'), Escape(value.String())...)
		default:
			text = append(append(text, ':'), strings.ReplaceAll(fmt.Sprint(value), " ", ",")...)
		}
		text = append(text, ' ')
	}
	return string(text)
}

// set reads a field of an answer. It returns whether there is such a field, with such a value.
func (a *Answer) set(name, text string) (ok bool) {
	i := slices.IndexFunc(answerFields, func(f field) bool { return f.name == name })
	if i < 0 {
		return false
	}
	switch field := reflect.ValueOf(a).Elem().FieldByIndex(answerFields[i].index).Addr().Interface().(type) {
	case *int64:
		*field, ok = integer(text)
	case *bool:
		*field, ok = text == "1", true
	case *string:
		*field, ok = Unescape(text), true
	case *[]int64:
		for word := range strings.SplitSeq(text, ",") {
			n, isNumber := integer(word)
			*field, ok = append(*field, n), isNumber
			if !ok {
				break
			}
		}
	}
	return ok
}

func integer(text string) (n int64, ok bool) {
	n, err := strconv.ParseInt(text, 10, 64)
	return n, err == nil
}

// read reads the fields of an answer.
func (a *Answer) read(text string) (ok bool) {
	ok = true
	for field := range strings.FieldsSeq(text) {
		i := max(0, strings.IndexAny(field, "=:"))
		ok = ok && a.set(field[:i], field[i+1:])
	}
	return ok
}
