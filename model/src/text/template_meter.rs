//! The meter of a template's values. It limits the weight of one value and of all values made.
//!
//! Every operator, filter and method passes the values it makes through here (see `template_metering.rs`). If a single
//! step could make a huge value, it is checked before it runs.

use std::fmt;

use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters, functions};

use super::python_value::display;
use super::template_metering::{KEEP, METER, TEXT, TIMES};

/// Bytes of a value besides its text: more than any entry of a list or a map takes.
const ENTRY_BYTES: u64 = 64;
/// Maximum levels of nested lists and maps. Dropping or printing deeper ones would exhaust the stack.
const DEPTH_MAX: usize = 64;

/// Limits on the values of one rendering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MeterLimits {
    /// Maximum bytes of one value, with everything in it.
    pub value_bytes_max: u64,
    /// Maximum bytes of all values made, whether they still exist or not.
    pub total_bytes_max: u64,
}

/// Bytes made so far by one rendering, kept in minijinja's state.
#[derive(Clone, Copy, Default)]
struct Made(u64);

/// The cause of a minijinja error when a template exceeds a limit.
#[derive(Debug)]
pub(super) struct TooHeavy {
    pub bytes_max: u64,
}

impl fmt::Display for TooHeavy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "more than {} bytes", self.bytes_max)
    }
}

impl std::error::Error for TooHeavy {}

fn too_heavy(bytes_max: u64) -> Error {
    Error::new(ErrorKind::InvalidOperation, "too heavy").with_source(TooHeavy { bytes_max })
}

impl MeterLimits {
    /// Adds to the bytes that this rendering has made.
    pub fn add(self, state: &mut State, bytes: u64) -> Result<(), Error> {
        let made = state.get_or_insert_extension(Made::default());
        made.0 = made.0.saturating_add(bytes);
        if made.0 > self.total_bytes_max { Err(too_heavy(self.total_bytes_max)) } else { Ok(()) }
    }

    fn check(self, bytes: u64) -> Result<(), Error> {
        if bytes > self.value_bytes_max { Err(too_heavy(self.value_bytes_max)) } else { Ok(()) }
    }

    fn meter(self, state: &mut State, value: Value) -> Result<Value, Error> {
        let bytes = self.weigh(&value, 0, &mut |_| false)?;
        self.add(state, bytes)?;
        Ok(value)
    }

    /// Bytes of a value with everything in it, where shared parts count each time.
    fn weigh(self, value: &Value, depth: usize, refused: &mut dyn FnMut(&Value) -> bool) -> Result<u64, Error> {
        if refused(value) {
            return Err(Error::new(ErrorKind::InvalidOperation, "a namespace cannot hold a namespace"));
        }
        let mut bytes = ENTRY_BYTES;
        match value.kind() {
            ValueKind::String | ValueKind::Bytes => {
                bytes += value.as_str().map_or_else(|| value.as_bytes().map_or(0, <[u8]>::len), str::len) as u64;
            }
            ValueKind::Seq | ValueKind::Iterable | ValueKind::Map if depth == DEPTH_MAX => {
                return Err(too_heavy(self.value_bytes_max));
            }
            ValueKind::Seq | ValueKind::Iterable => {
                // A sequence that knows its length is refused without iterating.
                self.check((value.len().unwrap_or(0) as u64).saturating_mul(ENTRY_BYTES))?;
                for item in value.try_iter()? {
                    bytes += self.weigh(&item, depth + 1, refused)?;
                    self.check(bytes)?;
                }
            }
            ValueKind::Map => {
                for key in value.try_iter()? {
                    bytes += self.weigh(&key, depth + 1, refused)?;
                    bytes += self.weigh(&value.get_item(&key)?, depth + 1, refused)?;
                    self.check(bytes)?;
                }
            }
            _ => {}
        }
        self.check(bytes)?;
        Ok(bytes)
    }

    /// `a * b`: the product of numbers, or a text or a list repeated.
    fn times(self, state: &mut State, left: &Value, right: &Value) -> Result<Value, Error> {
        let wrong = || Error::new(ErrorKind::InvalidOperation, "these cannot be multiplied");
        let many = match (left.kind(), right.kind()) {
            (ValueKind::Number | ValueKind::Bool, ValueKind::Number | ValueKind::Bool) => {
                return multiplied(left, right).ok_or_else(wrong);
            }
            (ValueKind::String | ValueKind::Seq | ValueKind::Iterable, ValueKind::Number) => (left, right),
            (ValueKind::Number, ValueKind::String | ValueKind::Seq | ValueKind::Iterable) => (right, left),
            _ => return Err(wrong()),
        };
        let count = u64::try_from(i64::try_from(many.1.clone())?.max(0)).unwrap_or(0);
        let bytes = match many.0.as_str() {
            Some(text) => (text.len() as u64).saturating_mul(count),
            None => self.weigh(many.0, 0, &mut |_| false)?.saturating_mul(count),
        };
        self.check(bytes)?;
        self.add(state, bytes)?;
        if let Some(text) = many.0.as_str() {
            return Ok(Value::from(text.repeat(count as usize)));
        }
        let items: Vec<Value> = many.0.try_iter()?.collect();
        Ok(Value::from_iter(std::iter::repeat_n(items, count as usize).flatten()))
    }

    /// Checks the result of `replace` in advance.
    fn check_replaced(self, arguments: &[Value]) -> Result<(), Error> {
        let [Some(text), Some(from), Some(to)] = [0, 1, 2].map(|place| arguments.get(place).and_then(Value::as_str))
        else {
            return Ok(()); // the call itself refuses them
        };
        let count = if from.is_empty() { text.chars().count() + 1 } else { text.matches(from).count() };
        self.check((count as u64).saturating_mul(to.len() as u64).saturating_add(text.len() as u64))
    }

    /// Checks the result of `join` in advance.
    fn check_joined(self, items: Option<&Value>, joiner: Option<&Value>) -> Result<(), Error> {
        let Some(Ok(items)) = items.map(Value::try_iter) else { return Ok(()) };
        let joiner = joiner.and_then(Value::as_str).map_or(0, str::len) as u64;
        let mut bytes = 0;
        for item in items {
            bytes += joiner + self.weigh(&item, 0, &mut |_| false)?;
            self.check(bytes)?;
        }
        Ok(())
    }

    /// Checks the result of `format` in advance. Widths are read from the text. Widths from arguments (`%*d`, `{:{}}`)
    /// are refused.
    fn check_format(self, arguments: &[Value]) -> Result<(), Error> {
        let Some(text) = arguments.first().and_then(Value::as_str) else { return Ok(()) };
        let widest = text.split(|char: char| !char.is_ascii_digit()).map(str::len).max().unwrap_or(0);
        if widest > 4 || text.contains('*') || has_place_in_place(text) {
            return Err(too_heavy(self.value_bytes_max));
        }
        let mut largest = 10_000;
        for argument in &arguments[1..] {
            largest = largest.max(self.weigh(argument, 0, &mut |_| false)?);
        }
        let places = text.bytes().filter(|byte| matches!(byte, b'%' | b'{')).count() as u64;
        self.check((text.len() as u64).saturating_add(places.saturating_mul(largest)))
    }

    /// Checks numbers among the arguments, which become widths and counts.
    fn check_counts(self, arguments: &[Value]) -> Result<(), Error> {
        let texts: u64 =
            arguments.iter().filter_map(Value::as_str).map(|text| 1 + text.matches('\n').count() as u64).sum();
        let counts = arguments.iter().filter_map(|argument| u64::try_from(argument.clone()).ok());
        counts.max().map_or(Ok(()), |count| self.check(count.saturating_mul(ENTRY_BYTES.max(texts))))
    }

    /// Checks a filter or a method before it runs. The value itself is the first argument.
    fn check_before(self, name: &str, arguments: &[Value]) -> Result<(), Error> {
        match name {
            "replace" => self.check_replaced(arguments),
            "join" => self.check_joined(arguments.first(), arguments.get(1)),
            "format" => self.check_format(arguments),
            "indent" | "batch" | "slice" => self.check_counts(arguments),
            // Filters and methods that make a list of a text's pieces.
            _ => match arguments.first().and_then(Value::as_str) {
                Some(text) => self.check((pieces(name, text, arguments.get(1)) as u64).saturating_mul(ENTRY_BYTES)),
                None => Ok(()),
            },
        }
    }

    /// Calls one of Python's methods and weighs its result.
    pub fn method(self, state: &mut State, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
        let all: Vec<Value> = std::iter::once(value).chain(arguments).cloned().collect();
        match name {
            // In the method `join` the text is the joiner, unlike in the filter.
            "join" => self.check_joined(all.get(1), all.first())?,
            _ => self.check_before(name, &all)?,
        }
        let made = minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments)?;
        self.meter(state, made)
    }

    /// Replaces minijinja's filters and functions with weighed ones.
    pub fn install(self, environment: &mut Environment<'_>) {
        environment.add_filter(METER, move |state: &mut State, value: Value| self.meter(state, value));
        environment.add_filter(KEEP, move |value: Value| {
            self.weigh(&value, 0, &mut is_namespace)?;
            Ok::<_, Error>(value)
        });
        environment
            .add_filter(TIMES, move |state: &mut State, left: Value, right: Value| self.times(state, &left, &right));
        environment.add_function(TEXT, move |state: &mut State, bytes: u64| {
            self.add(state, bytes)?;
            Ok::<_, Error>(Value::from(""))
        });
        let printed = move |value: Value| -> Result<String, Error> {
            self.weigh(&value, 0, &mut |_| false)?;
            Ok(display(&value))
        };
        environment.add_filter("string", printed);
        environment.add_filter("pprint", printed);
        self.install_filters(environment);
        // `debug` would print the whole state, with all messages.
        environment.remove_global("debug");
        for (name, function) in
            [("dict", Value::from_function(functions::dict)), ("namespace", Value::from_function(functions::namespace))]
        {
            let is_kept = name == "namespace";
            environment.add_function(name, move |state: &mut State, arguments: Rest<ValueOrKwargs>| {
                let arguments = arguments.into_values();
                if is_kept {
                    for argument in arguments.iter() {
                        self.weigh(argument, 0, &mut is_namespace)?;
                    }
                }
                let made = function.call(state, &arguments)?;
                self.meter(state, made)
            });
        }
    }

    fn install_filters(self, environment: &mut Environment<'_>) {
        macro_rules! weighed {
            ($($name:ident),*) => {
                $({
                    let filter = Value::from_function(filters::$name);
                    environment.add_filter(stringify!($name), move |state: &mut State, arguments: Rest<ValueOrKwargs>| {
let arguments = arguments.into_values();
                        self.check_before(stringify!($name), &arguments)?;
                        let made = filter.call(state, &arguments)?;
                        self.meter(state, made)
                    });
                })*
            };
        }
        weighed!(
            escape, lower, upper, title, capitalize, replace, dictsort, items, reverse, trim, join, split, lines, sort,
            list, batch, slice, sum, indent, select, reject, selectattr, rejectattr, map, groupby, unique, chain, zip,
            format
        );
        let escape = Value::from_function(filters::escape);
        environment.add_filter("e", move |state: &mut State, arguments: Rest<ValueOrKwargs>| {
            let arguments = arguments.into_values();
            let made = escape.call(state, &arguments)?;
            self.meter(state, made)
        });
    }
}

/// Whether a width or the like comes from an argument, as in `{:{}}`. A double brace is a literal brace.
fn has_place_in_place(format: &str) -> bool {
    let mut is_in_place = false;
    let plain = format.replace("{{", "");
    plain.chars().any(|char| {
        let is_nested = is_in_place && char == '{';
        is_in_place = char == '{' || (is_in_place && char != '}');
        is_nested
    })
}

/// Upper bound on the entries that a filter or a method makes of a text.
fn pieces(name: &str, text: &str, separator: Option<&Value>) -> usize {
    match (name, separator.and_then(Value::as_str)) {
        ("split", Some(separator)) if !separator.is_empty() => text.matches(separator).count(),
        ("split", _) => text.split_whitespace().count(),
        ("lines" | "splitlines", _) => text.matches(['\n', '\r']).count(),
        ("list" | "sort" | "unique" | "map" | "select" | "reject" | "chain" | "zip", _) => text.chars().count(),
        _ => 0,
    }
}

fn multiplied(left: &Value, right: &Value) -> Option<Value> {
    let whole = |value: &Value| {
        i128::try_from(value.clone()).ok().filter(|_| value.kind() == ValueKind::Bool || value.is_integer())
    };
    match (whole(left), whole(right)) {
        (Some(left), Some(right)) => left.checked_mul(right).map(Value::from),
        _ => Some(Value::from(f64::try_from(left.clone()).ok()? * f64::try_from(right.clone()).ok()?)),
    }
}

/// minijinja exposes the type of its namespaces only by name.
fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}
