//! The meter of a template's values. It limits the bytes of one value and of all values
//! that a rendering creates.
//!
//! Operators, methods and most filters pass the values that they create through the meter (see
//! `template_metering.rs`). Filters that return existing values do not. A step that could create a
//! huge value is checked before it runs; `tojson` checks the size of its text as it writes.

use std::fmt;

use minijinja::value::{Kwargs, Rest, Serde, Tuple, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters, functions};

use super::jinja_filters::{MAKERS, READERS, minijinja_parameters};
use super::jinja_tests;
use super::jinja_wrap::Wrapping;
use super::python_call::bind;
use super::python_chars::{is_line_break, is_space};
use super::python_format::{WIDTH_DIGITS_MAX, percent};
use super::python_methods;
use super::python_numbers::{multiplied, remainder};
use super::python_objects::{Cycler, Range};
use super::python_slice::sliced;
use super::python_value::{display, tojson};
use super::template_metering::{ABSENT, KEEP, METER, PERCENT, SHOWN, SLICE, TEXT, TIMES};

/// Bytes counted per value in addition to its text: more than any entry of a list or a map takes.
const ENTRY_BYTES: u64 = 64;
/// Maximum levels of nested lists and maps. Dropping or printing deeper values would exhaust the
/// stack.
const DEPTH_MAX: usize = 64;

/// Limits on the values of one rendering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MeterLimits {
    /// Maximum bytes of one value, including nested values.
    pub value_bytes_max: u64,
    /// Maximum bytes of all values created, including values that were dropped since.
    pub total_bytes_max: u64,
}

/// Bytes of the values that one rendering has created so far. The count is stored in minijinja's
/// state.
#[derive(Clone, Copy, Default)]
struct Made(u64);

/// The cause of a minijinja error when a template exceeds a limit.
#[derive(Debug)]
pub(super) struct SizeLimitExceeded {
    pub bytes_max: u64,
}

impl fmt::Display for SizeLimitExceeded {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "more than {} bytes", self.bytes_max)
    }
}

impl std::error::Error for SizeLimitExceeded {}

fn too_heavy(bytes_max: u64) -> Error {
    Error::new(ErrorKind::InvalidOperation, "too many bytes").with_source(SizeLimitExceeded { bytes_max })
}

impl MeterLimits {
    /// Adds to the bytes that this rendering has created.
    pub fn add(self, state: &mut State, bytes: u64) -> Result<(), Error> {
        let made = state.get_or_insert_extension(Made::default());
        made.0 = made.0.saturating_add(bytes);
        if made.0 > self.total_bytes_max { Err(too_heavy(self.total_bytes_max)) } else { Ok(()) }
    }

    fn check(self, bytes: u64) -> Result<(), Error> {
        if bytes > self.value_bytes_max { Err(too_heavy(self.value_bytes_max)) } else { Ok(()) }
    }

    fn meter(self, state: &mut State, value: Value) -> Result<Value, Error> {
        let bytes = self.size_of(&value, 0, &mut |_| false)?;
        self.add(state, bytes)?;
        Ok(value)
    }

    /// Bytes of a value, including nested values. A value that occurs several times
    /// is counted each time.
    fn size_of(self, value: &Value, depth: usize, refused: &mut dyn FnMut(&Value) -> bool) -> Result<u64, Error> {
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
                    bytes += self.size_of(&item, depth + 1, refused)?;
                    self.check(bytes)?;
                }
            }
            ValueKind::Map => {
                for key in value.try_iter()? {
                    bytes += self.size_of(&key, depth + 1, refused)?;
                    bytes += self.size_of(&value.get_item(&key)?, depth + 1, refused)?;
                    self.check(bytes)?;
                }
            }
            _ => {}
        }
        self.check(bytes)?;
        Ok(bytes)
    }

    /// Evaluates `a * b`: the product of numbers, or a repeated text or list.
    fn times(self, state: &mut State, left: &Value, right: &Value) -> Result<Value, Error> {
        let wrong = || Error::new(ErrorKind::InvalidOperation, "these values cannot be multiplied");
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
            None => self.size_of(many.0, 0, &mut |_| false)?.saturating_mul(count),
        };
        self.check(bytes)?;
        self.add(state, bytes)?;
        if let Some(text) = many.0.as_str() {
            return Ok(Value::from(text.repeat(count as usize)));
        }
        let items: Vec<Value> = many.0.try_iter()?.collect();
        let repeated: Vec<Value> = std::iter::repeat_n(items, count as usize).flatten().collect();
        Ok(if many.0.is_tuple() { Value::from(Tuple::from(repeated)) } else { Value::from(repeated) })
    }

    /// Evaluates `a % b`: the remainder of numbers, or a formatted text.
    fn percent(self, state: &mut State, left: &Value, right: &Value) -> Result<Value, Error> {
        let Some(template) = left.as_str() else { return remainder(left, right) };
        self.check_format(&[left.clone(), right.clone()])?;
        let made = Value::from(percent(template, right)?);
        self.meter(state, made)
    }

    /// Checks the size of the result of `replace` in advance.
    fn check_replaced(self, text: &str, old: &str, new: &str) -> Result<(), Error> {
        let count = if old.is_empty() { text.chars().count() + 1 } else { text.matches(old).count() };
        self.check((count as u64).saturating_mul(new.len() as u64).saturating_add(text.len() as u64))
    }

    /// Checks the size of the result of `join` in advance.
    fn check_joined(self, items: Option<&Value>, joiner: Option<&Value>) -> Result<(), Error> {
        let Some(Ok(items)) = items.map(Value::try_iter) else { return Ok(()) };
        let joiner = joiner.and_then(Value::as_str).map_or(0, str::len) as u64;
        let mut bytes = 0;
        for item in items {
            bytes += joiner + self.size_of(&item, 0, &mut |_| false)?;
            self.check(bytes)?;
        }
        Ok(())
    }

    /// Checks the size of the result of `format` or `%` in advance. Widths are read from the text.
    /// `python_format` also limits widths from arguments (`%*d`, `{:{}}`) to four digits.
    fn check_format(self, arguments: &[Value]) -> Result<(), Error> {
        let Some(text) = arguments.first().and_then(Value::as_str) else { return Ok(()) };
        let widest = text.split(|char: char| !char.is_ascii_digit()).map(str::len).max().unwrap_or(0);
        if widest > WIDTH_DIGITS_MAX {
            return Err(too_heavy(self.value_bytes_max));
        }
        // Padding to a width of four digits, with four bytes per fill character.
        let mut largest = 40_000;
        for argument in &arguments[1..] {
            largest = largest.max(self.size_of(argument, 0, &mut |_| false)?);
        }
        let places = text.bytes().filter(|byte| matches!(byte, b'%' | b'{')).count() as u64;
        self.check((text.len() as u64).saturating_add(places.saturating_mul(largest)))
    }

    /// Checks the numbers among the arguments, which are widths or counts of
    /// characters, lines or entries.
    fn check_counts(self, arguments: &[Value]) -> Result<(), Error> {
        let named = arguments.iter().filter(|argument| argument.is_kwargs());
        let named = named.flat_map(|named| named.try_iter().into_iter().flatten().map(|key| named.get_item(&key)));
        let named: Vec<Value> = named.collect::<Result<_, _>>()?;
        let plain = || arguments.iter().chain(&named).filter(|argument| !argument.is_kwargs());
        let pieces =
            |text: &str| 1 + text.matches(|char: char| char.is_control() || char.is_whitespace()).count() as u64;
        let texts: u64 = plain().filter_map(Value::as_str).map(pieces).sum();
        // A text argument may be repeated for each line, as the margin of `indent` is.
        let bytes = plain().filter_map(Value::as_str).skip(1).map(|text| text.len() as u64).max().unwrap_or(0);
        self.check(bytes.saturating_mul(texts))?;
        let counts = plain().filter_map(|argument| u64::try_from(argument.clone()).ok());
        counts.max().map_or(Ok(()), |count| self.check(count.saturating_mul(ENTRY_BYTES.max(texts))))
    }

    /// Checks a filter or a method before it runs. The value itself is the first argument.
    fn check_before(self, name: &str, arguments: &[Value]) -> Result<(), Error> {
        let texts = |place: usize| arguments.get(place).map(display).unwrap_or_default();
        match name {
            "replace" => self.check_replaced(&texts(0), &texts(1), &texts(2)),
            "join" => self.check_joined(arguments.first(), arguments.get(1)),
            "wordwrap" => {
                let wrapping = Wrapping::of(arguments)?;
                self.check((wrapping.pieces() as u64).saturating_mul(ENTRY_BYTES.max(wrapping.between.len() as u64)))
            }
            "format" => self.check_format(arguments),
            "indent" | "batch" | "slice" | "center" | "ljust" | "rjust" | "zfill" | "expandtabs" => {
                self.check_counts(arguments)
            }
            // Filters and methods that split a text into a list of pieces.
            _ => match arguments.first().and_then(Value::as_str) {
                Some(text) => self.check((pieces(name, text, arguments.get(1)) as u64).saturating_mul(ENTRY_BYTES)),
                None => Ok(()),
            },
        }
    }

    /// Calls a Python method and weighs its result.
    pub fn method(self, state: &mut State, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
        let all: Vec<Value> = std::iter::once(value).chain(arguments).cloned().collect();
        match name {
            // Unlike in the filter `join`, the subject of the method `join` is the joiner.
            "join" => self.check_joined(all.get(1), all.first())?,
            _ => self.check_before(name, &all)?,
        }
        let made = python_methods::call(value, name, arguments)?;
        self.meter(state, made)
    }

    /// Replaces minijinja's filters, tests and functions with metered versions that behave as in
    /// Jinja2.
    pub fn install(self, environment: &mut Environment<'_>) {
        self.install_operators(environment);
        self.install_filters(environment);
        self.install_functions(environment);
        jinja_tests::install(environment);
    }

    /// Installs the filters and functions that replace operators in a rewritten template.
    fn install_operators(self, environment: &mut Environment<'_>) {
        environment.add_filter(METER, move |state: &mut State, value: Value| self.meter(state, value));
        environment.add_filter(KEEP, move |value: Value| {
            self.size_of(&value, 0, &mut is_namespace)?;
            Ok::<_, Error>(value)
        });
        environment
            .add_filter(TIMES, move |state: &mut State, left: Value, right: Value| self.times(state, &left, &right));
        environment.add_filter(PERCENT, move |state: &mut State, left: Value, right: Value| {
            self.percent(state, &left, &right)
        });
        environment.add_filter(
            SLICE,
            move |state: &mut State, value: Value, start: Value, stop: Value, step: Value| {
                let made = sliced(&value, start, stop, step)?;
                self.meter(state, made)
            },
        );
        environment.add_filter(SHOWN, move |value: Value| {
            if value.kind() == ValueKind::String {
                return Ok(value);
            }
            self.size_of(&value, 0, &mut |_| false)?;
            Ok::<_, Error>(Value::from(display(&value)))
        });
        environment.add_filter(ABSENT, |value: Value| if value.is_undefined() { Value::from(()) } else { value });
        environment.add_function(TEXT, move |state: &mut State, bytes: u64| {
            self.add(state, bytes)?;
            Ok::<_, Error>(Value::from(""))
        });
    }

    fn install_functions(self, environment: &mut Environment<'_>) {
        // The function `debug` would print the whole state, including all messages.
        environment.remove_global("debug");
        environment.add_function("range", |arguments: Rest<ValueOrKwargs>| Range::of(&arguments.into_values()));
        environment.add_function("joiner", |arguments: Rest<ValueOrKwargs>| {
            let [separator] = bind(&arguments.into_values(), ["sep"])?;
            Ok::<_, Error>(minijinja_contrib::globals::joiner(separator))
        });
        environment.add_function("cycler", |items: Rest<Value>| Cycler::of(items.0));
        for (name, function) in
            [("dict", Value::from_function(functions::dict)), ("namespace", Value::from_function(functions::namespace))]
        {
            let is_kept = name == "namespace";
            environment.add_function(name, move |state: &mut State, arguments: Rest<ValueOrKwargs>| {
                let arguments = arguments.into_values();
                if is_kept {
                    for argument in arguments.iter() {
                        self.size_of(argument, 0, &mut is_namespace)?;
                    }
                }
                let made = function.call(state, &of_pairs(&arguments)?)?;
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
                        let arguments = in_minijinjas_order(stringify!($name), &arguments.into_values())?;
                        self.check_before(stringify!($name), &arguments)?;
                        let made = filter.call(state, &arguments)?;
                        self.meter(state, made)
                    });
                })*
            };
        }
        weighed!(
            abs, batch, chain, dictsort, groupby, lines, map, max, min, reject, rejectattr, reverse, round, select,
            selectattr, slice, sort, split, sum, unique, zip
        );
        for (name, filter) in READERS {
            environment.add_filter(name, move |arguments: Rest<ValueOrKwargs>| filter(&arguments.into_values()));
        }
        for (name, filter) in MAKERS {
            environment.add_filter(name, move |state: &mut State, arguments: Rest<ValueOrKwargs>| {
                let arguments = arguments.into_values();
                if let Some(printed) = arguments.first().filter(|value| value.kind() != ValueKind::String) {
                    self.size_of(printed, 0, &mut |_| false)?;
                }
                self.check_before(name, &arguments)?;
                let made = filter(&arguments)?;
                self.meter(state, made)
            });
        }
        environment.add_filter("tojson", move |state: &mut State, arguments: Rest<ValueOrKwargs>| {
            let made = tojson(&arguments.into_values(), &|bytes| self.check(bytes as u64))?;
            self.meter(state, Value::from(made))
        });
    }
}

/// The arguments of a filter in the form that minijinja takes them: some by position,
/// the rest by name.
fn in_minijinjas_order(filter: &str, arguments: &[Value]) -> Result<Vec<Value>, Error> {
    let Some((names, positional)) = minijinja_parameters(filter) else { return Ok(arguments.to_vec()) };
    let mut bound: [Option<Value>; 4] = [None, None, None, None];
    match names {
        [a, b, c, d] => bound = bind(arguments, [*a, *b, *c, *d])?,
        [a, b, c] => bound[..3].clone_from_slice(&bind(arguments, [*a, *b, *c])?),
        _ => return Ok(arguments.to_vec()),
    }
    let mut bound: Vec<Option<Value>> = bound.into_iter().take(names.len()).collect();
    let named = bound.split_off(positional.min(bound.len()));
    let named = names[positional..].iter().zip(named).filter_map(|(name, value)| Some((*name, value?)));
    let named: Vec<(&str, Value)> = named.collect();
    while bound.last().is_some_and(Option::is_none) {
        bound.pop();
    }
    let mut ordered: Vec<Value> = bound.into_iter().map(Option::unwrap_or_default).collect();
    if !named.is_empty() {
        ordered.push(Value::from(Kwargs::from_iter(named)));
    }
    Ok(ordered)
}

/// Upper bound on the number of entries into which a filter or a method splits a text; 0 if it
/// does not split. A split at separators gives one entry more than there are separators.
fn pieces(name: &str, text: &str, separator: Option<&Value>) -> usize {
    match (name, separator.and_then(Value::as_str)) {
        ("split" | "rsplit", Some(separator)) if !separator.is_empty() => text.matches(separator).count() + 1,
        ("split" | "rsplit", _) => text.split(is_space).count(),
        ("lines" | "splitlines", _) => text.matches(is_line_break).count() + 1,
        ("list" | "sort" | "unique" | "map" | "select" | "reject" | "chain" | "zip", _) => text.chars().count(),
        _ => 0,
    }
}

/// The entries of a map, serialized in this order.
struct Entries(Vec<(Value, Value)>);

impl serde::Serialize for Entries {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}

/// The arguments of `dict` or `namespace`, with lists of pairs converted to maps.
fn of_pairs(arguments: &[Value]) -> Result<Vec<Value>, Error> {
    let map = |argument: &Value| match argument.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            let pairs = argument.try_iter()?;
            let pair = |pair: Value| Ok((pair.get_item_by_index(0)?, pair.get_item_by_index(1)?));
            pairs.map(pair).collect::<Result<Vec<_>, Error>>().map(|entries| Value::from(Serde(Entries(entries))))
        }
        _ => Ok(argument.clone()),
    };
    arguments.iter().map(map).collect()
}

/// Whether a value is a namespace. minijinja exposes this type only by name.
fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_split_has_more_entries_than_its_bound() {
        for (name, text, separator, expected) in [
            ("split", "a,b,c", Some(","), 3),
            ("split", "abc", Some(","), 1),
            ("rsplit", ",,", Some(","), 3),
            ("split", "", Some(","), 1),
            ("split", " a  b ", None, 2),
            ("splitlines", "a\nb", None, 2),
            ("splitlines", "a\r\nb\n", None, 2),
        ] {
            let separator = separator.map(Value::from);
            let arguments: Vec<Value> = separator.iter().cloned().collect();
            let made = python_methods::call(&Value::from(text), name, &arguments).expect("the text is split");
            assert_eq!(made.len(), Some(expected), "{name} of {text:?}");
            let bound = pieces(name, text, separator.as_ref());
            assert!(bound >= expected, "{name} of {text:?} has {expected} entries; the bound is {bound}");
        }
    }

    #[test]
    fn a_split_beyond_the_limit_is_refused_before_it_runs() {
        let limits = |entries: u64| MeterLimits { value_bytes_max: entries * ENTRY_BYTES, total_bytes_max: u64::MAX };
        let arguments = [Value::from("a,b,c"), Value::from(",")];
        assert!(limits(2).check_before("split", &arguments).is_err(), "the result has three entries");
        limits(3).check_before("split", &arguments).expect("three entries are within the limit");
    }

    #[test]
    fn the_text_of_tojson_is_metered() {
        let mut environment = Environment::new();
        MeterLimits { value_bytes_max: 1000, total_bytes_max: 1500 }.install(&mut environment);
        let render = |template: &str, x: &str| environment.render_str(template, minijinja::context! { x });
        let limit_of = |error: Error| {
            let source =
                std::error::Error::source(&error).and_then(|source| source.downcast_ref::<SizeLimitExceeded>());
            source.expect("a limit was exceeded").bytes_max
        };
        let half = "a".repeat(600);
        assert_eq!(render("{{ x|tojson }}", &half).expect("one text is within the limits").len(), 602);
        assert_eq!(limit_of(render("{{ [x, x]|tojson }}", &half).expect_err("the text is too long")), 1000);
        let thrice = "{{ x|tojson }}{{ x|tojson }}{{ x|tojson }}";
        assert_eq!(limit_of(render(thrice, &half).expect_err("all texts together are too long")), 1500);
    }
}
