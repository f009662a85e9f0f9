//! Python's slices: `value[start:stop:step]`.
//!
//! Pure: values in, values out.

use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, Value};

use super::python_call::{refused, whole};

/// The slice of a text, a list or a tuple. Jinja2's undefined and values of other
/// types cannot be sliced.
///
/// # Errors
/// For a step of zero, bounds that are not whole numbers, and values that cannot be sliced.
pub(super) fn sliced(value: &Value, start: Value, stop: Value, step: Value) -> Result<Value, Error> {
    let step = whole(Some(step), 1)?;
    if step == 0 {
        return Err(refused("slice step cannot be zero"));
    }
    let bounds = |length: usize| -> Result<Vec<usize>, Error> {
        let length = length as i64;
        // Bounds beyond an end are clamped to that end. With a negative step, the lower end is -1,
        // before the first item.
        let (low, high) = if step > 0 { (0, length) } else { (-1, length - 1) };
        let bound = |value: &Value, default: i64| -> Result<i64, Error> {
            if value.is_none() || value.is_undefined() {
                return Ok(default);
            }
            let at = whole(Some(value.clone()), default)?;
            Ok(if at < 0 { at.saturating_add(length) } else { at }.clamp(low, high))
        };
        let (from, to) = if step > 0 { (low, high) } else { (high, low) };
        let (from, to) = (bound(&start, from)?, bound(&stop, to)?);
        let mut places = Vec::new();
        let mut at = from;
        while if step > 0 { at < to } else { at > to } {
            places.push(at as usize);
            at = at.saturating_add(step);
        }
        Ok(places)
    };
    match value.kind() {
        ValueKind::String => {
            let chars: Vec<char> = value.as_str().unwrap_or_default().chars().collect();
            Ok(Value::from(bounds(chars.len())?.into_iter().map(|at| chars[at]).collect::<String>()))
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            let kept: Vec<Value> = bounds(items.len())?.into_iter().map(|at| items[at].clone()).collect();
            Ok(if value.is_tuple() { Value::from(Tuple::from(kept)) } else { Value::from(kept) })
        }
        _ => Err(refused("this value cannot be sliced")),
    }
}
