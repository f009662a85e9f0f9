//! Methods of Python's values that templates may call. Jinja2's sandbox refuses methods
//! that change a value.
//!
//! Pure: values in, values out.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

use super::python_call::{bind, refused, whole};
use super::python_objects::View;
use super::python_strings;

/// Calls a method of `value`.
///
/// # Errors
/// The errors of Python, and [`ErrorKind::UnknownMethod`].
pub(super) fn call(value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => python_strings::call(value.as_str().unwrap_or_default(), method, arguments),
        ValueKind::Map => of_map(value, method, arguments),
        ValueKind::Seq | ValueKind::Iterable => of_list(value, method, arguments),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn of_map(map: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    match method {
        "get" => {
            let [key, default] = bind(arguments, ["key", "default"])?;
            let key = key.ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
            let value = map.as_object().and_then(|object| object.get_value(&key));
            Ok(value.or(default).unwrap_or_else(|| Value::from(())))
        }
        "copy" => {
            bind(arguments, [])?;
            Ok(map.clone())
        }
        _ => {
            let view = View::of(map, method)?.ok_or_else(|| Error::from(ErrorKind::UnknownMethod))?;
            bind(arguments, [])?;
            Ok(view)
        }
    }
}

fn of_list(list: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    match method {
        "copy" => {
            bind(arguments, [])?;
            Ok(list.clone())
        }
        "count" => {
            let [item] = bind(arguments, ["value"])?;
            let item = item.ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
            Ok(Value::from(list.try_iter()?.filter(|other| *other == item).count()))
        }
        "index" => {
            let [item, start, stop] = bind(arguments, ["value", "start", "stop"])?;
            let item = item.ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
            let length = list.len().unwrap_or(0) as i64;
            let bound = |at: i64| if at < 0 { (at + length).max(0) } else { at };
            let (start, stop) = (bound(whole(start, 0)?), bound(whole(stop, length)?));
            let mut places = list.try_iter()?.zip(0..).filter(|(_, at)| (start..stop).contains(at));
            let found = places.find(|(other, _)| *other == item).map(|(_, at)| Value::from(at));
            found.ok_or_else(|| refused("the value is not in the list"))
        }
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}
