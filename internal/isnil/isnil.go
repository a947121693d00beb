// Package isnil finds nil where an interface hides it.
package isnil

import "reflect"

// Value reports whether v is nil, or a nil pointer, map or function of any type, such as a
// *redis.Client that was declared and never made.
func Value(v any) bool {
	switch r := reflect.ValueOf(v); r.Kind() {
	case reflect.Func, reflect.Map, reflect.Pointer:
		return r.IsNil()
	case reflect.Invalid:
		return true
	}
	return false
}
