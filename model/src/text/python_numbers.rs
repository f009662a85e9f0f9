//! Multiplication and remainder with the semantics of Python's numbers.
//!
//! Pure: values in, values out.

use minijinja::value::ValueKind;
use minijinja::{Error, Value};

use super::python_call::refused;

/// A whole number, where `True` is 1 and `False` is 0.
fn whole(value: &Value) -> Option<i128> {
    let is_whole = value.kind() == ValueKind::Bool || value.is_integer();
    i128::try_from(value.clone()).ok().filter(|_| is_whole)
}

fn float(value: &Value) -> Option<f64> {
    match value.kind() {
        ValueKind::Number => f64::try_from(value.clone()).ok(),
        _ => whole(value).map(|whole| whole as f64),
    }
}

/// The product of two numbers, or `None` if the product is too large or an operand is not a number.
pub(super) fn multiplied(left: &Value, right: &Value) -> Option<Value> {
    match (whole(left), whole(right)) {
        (Some(left), Some(right)) => left.checked_mul(right).map(Value::from),
        _ => Some(Value::from(float(left)? * float(right)?)),
    }
}

/// Computes `left % right`, with the sign of `right`.
///
/// # Errors
/// If an operand is not a number, or `right` is zero.
pub(super) fn remainder(left: &Value, right: &Value) -> Result<Value, Error> {
    let zero = || refused("modulo by zero");
    if let (Some(left), Some(right)) = (whole(left), whole(right)) {
        // The remainder by -1 is always 0, but `checked_rem` fails if the quotient overflows.
        let rest = if right == -1 { Some(0) } else { left.checked_rem(right) }.ok_or_else(zero)?;
        return Ok(Value::from(if rest != 0 && (rest < 0) != (right < 0) { rest + right } else { rest }));
    }
    let (Some(left), Some(right)) = (float(left), float(right)) else {
        return Err(refused("only numbers have remainders"));
    };
    if right == 0.0 {
        return Err(zero());
    }
    let rest = left % right;
    Ok(Value::from(if rest == 0.0 {
        0f64.copysign(right)
    } else if (rest < 0.0) != (right < 0.0) {
        rest + right
    } else {
        rest
    }))
}
