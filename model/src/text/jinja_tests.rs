//! Tests of Jinja2 3.1 (such as `is sequence`) that minijinja lacks or whose results differ in
//! minijinja.

use minijinja::value::ValueKind;
use minijinja::{Environment, Error, Value};

use super::python_numbers::remainder;
use super::python_objects::View;
use super::python_value::is_macro;

/// Adds the tests to `environment`. They replace minijinja's tests of the same names.
pub(super) fn install(environment: &mut Environment<'_>) {
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_sequence);
    environment.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain || is_macro(value));
    environment.add_test("divisibleby", |value: Value, by: Value| Ok::<_, Error>(remainder(&value, &by)? == 0.into()));
    environment.add_test("odd", |value: Value| Ok::<_, Error>(remainder(&value, &2.into())? == 1.into()));
    environment.add_test("even", |value: Value| Ok::<_, Error>(remainder(&value, &2.into())? == 0.into()));
}

/// In Python, `None` is not iterable, but minijinja can iterate over it. Jinja2's undefined
/// is an empty iterable.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// Values with a length and with items: strings, lists, tuples, ranges, maps and Jinja2's
/// undefined.
fn is_sequence(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Undefined | ValueKind::String | ValueKind::Bytes | ValueKind::Seq | ValueKind::Map => true,
        ValueKind::Iterable => value.len().is_some() && value.downcast_object_ref::<View>().is_none(),
        _ => false,
    }
}
