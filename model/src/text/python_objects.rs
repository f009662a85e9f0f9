//! Objects of Python and Jinja2 that minijinja lacks or implements differently: `range`, the views
//! of a `dict`, and `cycler`.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use minijinja::value::{Enumerator, Object, ObjectRepr, Tuple};
use minijinja::{Error, ErrorKind, State, Value};

use super::python_call::{bind, refused, whole};

/// Maximum length of a range, as in Jinja2's sandbox.
const RANGE_MAX: i128 = 100_000;

/// Python's `range`: whole numbers at equal distances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Range {
    start: i64,
    stop: i64,
    step: i64,
    length: usize,
}

impl Range {
    /// The function `range`.
    ///
    /// # Errors
    /// For arguments that are not one to three whole numbers, a step of zero, or a range that is
    /// longer than Jinja2 allows.
    pub fn of(arguments: &[Value]) -> Result<Value, Error> {
        let [first, second, step] = bind(arguments, ["start", "stop", "step"])?;
        let first = first.ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
        let (start, stop) = match second {
            Some(stop) => (whole(Some(first), 0)?, whole(Some(stop), 0)?),
            None => (0, whole(Some(first), 0)?),
        };
        Range::new(start, stop, whole(step, 1)?).map(Value::from_object)
    }

    fn new(start: i64, stop: i64, step: i64) -> Result<Self, Error> {
        if step == 0 {
            return Err(refused("the step of a range must not be zero"));
        }
        let distance =
            if step > 0 { i128::from(stop) - i128::from(start) } else { i128::from(start) - i128::from(stop) };
        let stride = i128::from(step).abs();
        let length = ((distance + stride - 1) / stride).max(0);
        if length > RANGE_MAX {
            Err(refused("a range may have at most 100000 items"))
        } else {
            Ok(Range { start, stop, step, length: length as usize })
        }
    }

    fn at(&self, index: usize) -> i64 {
        // The product may wrap around. The sum then wraps around again, which gives the correct
        // result.
        self.start.wrapping_add(self.step.wrapping_mul(index as i64))
    }
}

/// Python's format, such as `range(0, 3)`.
impl fmt::Display for Range {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.step {
            1 => write!(formatter, "range({}, {})", self.start, self.stop),
            step => write!(formatter, "range({}, {}, {step})", self.start, self.stop),
        }
    }
}

impl Object for Range {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        key.as_usize().filter(|&index| index < self.length).map(|index| Value::from(self.at(index)))
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.length)
    }
}

/// A view of the keys, values or items of a map.
#[derive(Debug)]
pub(super) struct View {
    /// The type's name in Python, which `str()` shows.
    pub name: &'static str,
    entries: Vec<Value>,
}

impl View {
    /// The view that the method `name` of a map returns, or `None` if there is no such method.
    pub fn of(map: &Value, name: &str) -> Result<Option<Value>, Error> {
        let name = match name {
            "keys" => "dict_keys",
            "values" => "dict_values",
            "items" => "dict_items",
            _ => return Ok(None),
        };
        let entry = |key: Value| match name {
            "dict_keys" => Ok(key),
            "dict_values" => map.get_item(&key),
            _ => map.get_item(&key).map(|value| Value::from(Tuple::from([key, value]))),
        };
        let entries = map.try_iter()?.map(entry).collect::<Result<Vec<_>, _>>()?;
        Ok(Some(Value::from_object(View { name, entries })))
    }
}

impl Object for View {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn get_value(self: &Arc<Self>, _key: &Value) -> Option<Value> {
        None
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.entries.clone())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.entries.len())
    }
}

/// Jinja2's `cycler`: returns one item after another, and starts over after the last.
#[derive(Debug)]
pub(super) struct Cycler {
    items: Vec<Value>,
    next: AtomicUsize,
}

impl Cycler {
    /// The function `cycler`.
    ///
    /// # Errors
    /// If there are no items.
    pub fn of(items: Vec<Value>) -> Result<Value, Error> {
        if items.is_empty() {
            Err(refused("at least one item has to be provided"))
        } else {
            Ok(Value::from_object(Cycler { items, next: AtomicUsize::new(0) }))
        }
    }

    fn current(&self) -> Value {
        self.items[self.next.load(Ordering::Relaxed)].clone()
    }
}

impl Object for Cycler {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        (key.as_str() == Some("current")).then(|| self.current())
    }

    fn call_method(
        self: &Arc<Self>,
        _state: &mut State<'_, '_>,
        method: &str,
        arguments: &[Value],
    ) -> Result<Value, Error> {
        bind(arguments, [])?;
        let current = self.current();
        let place = self.next.load(Ordering::Relaxed);
        match method {
            "next" => self.next.store((place + 1) % self.items.len(), Ordering::Relaxed),
            "reset" => self.next.store(0, Ordering::Relaxed),
            _ => return Err(Error::from(ErrorKind::UnknownMethod)),
        }
        Ok(if method == "next" { current } else { Value::from(()) })
    }
}
