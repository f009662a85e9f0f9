//! The meter of a template's values: what one may weigh, and all that are made together.
//!
//! Every operator, filter and method that makes a value passes it on here (see `template_metering.rs`); those that could
//! make a huge one in a single step are held against the limit before they do.

use std::fmt;

use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters, functions};

use super::python_value::display;
use super::template_metering::{KEEP, METER, TEXT, TIMES};

/// What a value weighs beside its text: more than any entry of a list or a map takes.
const ENTRY_BYTES: u64 = 64;
/// Lists in lists that are weighed. Deeper ones would exhaust the stack of whoever drops or prints them.
const DEPTH_MAX: usize = 64;

/// What the values of one rendering may weigh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MeterLimits {
    /// One value, with everything in it.
    pub value_bytes_max: u64,
    /// All that are made, whether they still exist or not.
    pub total_bytes_max: u64,
}

/// One rendering's meter; lives in minijinja's state.
#[derive(Clone, Copy, Default)]
struct Made(u64);

/// A template wanted more than it may have: the cause of the error that minijinja carries.
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
    /// Adds bytes to what this rendering has made.
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

    /// What a value weighs with everything in it, as often as it is in it.
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
                // One that knows its length is refused without a walk.
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

    /// `a * b`: numbers, or a text or a list so many times.
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

    /// Whether `text` with every `from` become `to` is light enough.
    fn check_replaced(self, arguments: &[Value]) -> Result<(), Error> {
        let [Some(text), Some(from), Some(to)] = [0, 1, 2].map(|place| arguments.get(place).and_then(Value::as_str))
        else {
            return Ok(()); // refused by whoever is called
        };
        let count = if from.is_empty() { text.chars().count() + 1 } else { text.matches(from).count() };
        self.check((count as u64).saturating_mul(to.len() as u64).saturating_add(text.len() as u64))
    }

    /// Whether the items, one after the other with `joiner` between them, are light enough.
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

    /// Whether a text with its placeholders filled is light enough. Widths are read from the text, and refused when they
    /// come from elsewhere (`%*d`, `{:{}}`).
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

    /// Whether numbers among the arguments, which become widths and counts, are small enough.
    fn check_counts(self, arguments: &[Value]) -> Result<(), Error> {
        let texts: u64 =
            arguments.iter().filter_map(Value::as_str).map(|text| 1 + text.matches('\n').count() as u64).sum();
        let counts = arguments.iter().filter_map(|argument| u64::try_from(argument.clone()).ok());
        counts.max().map_or(Ok(()), |count| self.check(count.saturating_mul(ENTRY_BYTES.max(texts))))
    }

    /// What is known before a filter or a method of this name runs; the value itself is the first argument.
    fn check_before(self, name: &str, arguments: &[Value]) -> Result<(), Error> {
        match name {
            "replace" => self.check_replaced(arguments),
            "join" => self.check_joined(arguments.first(), arguments.get(1)),
            "format" => self.check_format(arguments),
            "indent" | "batch" | "slice" => self.check_counts(arguments),
            // What makes a list of a text's pieces.
            _ => match arguments.first().and_then(Value::as_str) {
                Some(text) => self.check((pieces(name, text, arguments.get(1)) as u64).saturating_mul(ENTRY_BYTES)),
                None => Ok(()),
            },
        }
    }

    /// Python's methods, weighed.
    pub fn method(self, state: &mut State, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
        let all: Vec<Value> = std::iter::once(value).chain(arguments).cloned().collect();
        match name {
            // Of a method the text is the joiner.
            "join" => self.check_joined(all.get(1), all.first())?,
            _ => self.check_before(name, &all)?,
        }
        let made = minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments)?;
        self.meter(state, made)
    }

    /// Puts weighed filters and functions in the place of minijinja's own.
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
        // What it prints is the whole state, others' messages included.
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

/// Whether a width or the like comes from an argument, as in `{:{}}`. Two braces are the letter.
fn has_place_in_place(format: &str) -> bool {
    let mut is_in_place = false;
    let plain = format.replace("{{", "");
    plain.chars().any(|char| {
        let is_nested = is_in_place && char == '{';
        is_in_place = char == '{' || (is_in_place && char != '}');
        is_nested
    })
}

/// How many entries a filter or a method makes of a text, at most.
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

/// minijinja tells of its namespaces' type by name alone.
fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}
