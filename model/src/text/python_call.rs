//! Binding of arguments to the parameters of Python functions, by position or by name.

use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Error, ErrorKind, Value};

/// An error of a function call, which ends rendering.
pub(super) fn refused(what: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

/// The values of the parameters `names`. `None` means that the call does not pass this argument.
pub(super) fn bind<const N: usize>(arguments: &[Value], names: [&str; N]) -> Result<[Option<Value>; N], Error> {
    let (positional, named): (&[Value], Kwargs) = from_args(arguments)?;
    if positional.len() > N {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let mut bound = std::array::from_fn(|at| positional.get(at).cloned());
    for (value, name) in bound.iter_mut().zip(names).filter(|(_, name)| named.has(name)) {
        if value.replace(named.get(name)?).is_some() {
            return Err(Error::from(ErrorKind::TooManyArguments));
        }
    }
    named.assert_all_used()?;
    Ok(bound)
}

/// The argument, unless it is Python's `None` or undefined, which count as omitted.
pub(super) fn given(argument: Option<Value>) -> Option<Value> {
    argument.filter(|value| !value.is_none() && !value.is_undefined())
}

pub(super) fn text(value: &Value) -> Result<&str, Error> {
    match value.kind() {
        ValueKind::String => value.as_str(),
        _ => None,
    }
    .ok_or_else(|| refused("an argument must be a string"))
}

/// A whole number, or `default` if the argument is omitted.
pub(super) fn whole(argument: Option<Value>, default: i64) -> Result<i64, Error> {
    match given(argument) {
        Some(value) if value.is_integer() || value.kind() == ValueKind::Bool => {
            i64::try_from(value).map_err(|_| refused("a number is too large"))
        }
        Some(_) => Err(refused("an argument must be a whole number")),
        None => Ok(default),
    }
}

/// Whether an argument is true, or `default` if it is omitted.
pub(super) fn flag(argument: Option<Value>, default: bool) -> bool {
    argument.map_or(default, |value| value.is_true())
}
