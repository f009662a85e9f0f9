//! Lenient JSON values for clients of vLLM. vLLM parses requests with pydantic, which accepts
//! `"16"` and `16.0` for an integer and `1` for a Boolean.

use serde::{
    Deserializer,
    de::{
        IntoDeserializer, Visitor,
        value::{MapDeserializer, SeqDeserializer},
    },
    forward_to_deserialize_any,
};
use serde_json::{Error, Number, Value};

/// A JSON value whose numbers and Booleans may be written as pydantic accepts them.
pub(super) struct Lenient(pub(super) Value);

/// Converts a string or a float that holds a whole number to an integer. Other
/// values are returned unchanged.
fn whole(value: Value) -> Value {
    /// An f64 represents every integer up to this magnitude exactly.
    const EXACT: f64 = (1_u64 << 53) as f64;
    let of_float = |float: f64| (float.fract() == 0.0 && float.abs() <= EXACT).then(|| Value::from(float as i64));
    let read = match &value {
        Value::Number(number) if number.is_f64() => number.as_f64().and_then(of_float),
        Value::String(text) => {
            let text = text.trim();
            let whole = text.parse::<i64>().map(Value::from).or_else(|_| text.parse::<u64>().map(Value::from));
            whole.ok().or_else(|| of_float(decimal(text)?))
        }
        _ => None,
    };
    read.unwrap_or(value)
}

/// Parses a decimal number. `inf` and `nan` are rejected.
fn decimal(text: &str) -> Option<f64> {
    let is_decimal = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'.' | b'-' | b'+' | b'e' | b'E'));
    text.parse().ok().filter(|_| is_decimal)
}

fn float(value: Value) -> Value {
    let read = match &value {
        Value::String(text) => decimal(text.trim()).and_then(Number::from_f64).map(Value::Number),
        _ => None,
    };
    read.unwrap_or(value)
}

fn truth(value: Value) -> Value {
    let text = match &value {
        Value::String(text) => text.trim().to_ascii_lowercase(),
        Value::Number(number) => number.to_string(),
        _ => return value,
    };
    match text.as_str() {
        "true" | "1" | "1.0" | "yes" | "y" | "on" | "t" => true.into(),
        "false" | "0" | "0.0" | "no" | "n" | "off" | "f" => false.into(),
        _ => value,
    }
}

impl IntoDeserializer<'_, Error> for Lenient {
    type Deserializer = Lenient;

    fn into_deserializer(self) -> Lenient {
        self
    }
}

/// Deserializer methods that first convert the value to the requested kind.
macro_rules! read_as {
    ($($method:ident as $reading:ident),* $(,)?) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            $reading(self.0).$method(visitor)
        }
    )*};
}

impl<'de> Deserializer<'de> for Lenient {
    type Error = Error;

    read_as! {
        deserialize_u8 as whole, deserialize_u16 as whole, deserialize_u32 as whole, deserialize_u64 as whole,
        deserialize_i8 as whole, deserialize_i16 as whole, deserialize_i32 as whole, deserialize_i64 as whole,
        deserialize_f32 as float, deserialize_f64 as float, deserialize_bool as truth,
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Array(items) => visitor.visit_seq(SeqDeserializer::new(items.into_iter().map(Lenient))),
            Value::Object(members) => {
                let members = members.into_iter().map(|(name, value)| (name, Lenient(value)));
                visitor.visit_map(MapDeserializer::new(members))
            }
            value => value.deserialize_any(visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.0.deserialize_enum(name, variants, visitor)
    }

    forward_to_deserialize_any! {
        i128 u128 char str string bytes byte_buf unit unit_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Default, PartialEq, Deserialize)]
    #[serde(default)]
    struct Asked {
        count: Option<usize>,
        seed: Option<i64>,
        share: Option<f64>,
        is_on: Option<bool>,
        text: Option<String>,
        inner: Vec<Asked>,
    }

    fn read(value: Value) -> Option<Asked> {
        Asked::deserialize(Lenient(value)).ok()
    }

    #[test]
    fn numbers_and_booleans_are_parsed_like_pydantic() {
        let count = |count| Some(Asked { count: Some(count), ..Asked::default() });
        for written in [json!(16), json!(16.0), json!("16"), json!(" 16 "), json!("16.0"), json!("1.6e1"), json!("+16")]
        {
            assert_eq!(read(json!({"count": written})), count(16), "{written}");
        }
        assert_eq!(read(json!({"inner": [{"count": "3"}]})).map(|asked| asked.inner.len()), Some(1));
        let share = |value: Value| read(json!({"share": value})).and_then(|asked| asked.share);
        assert_eq!([share(json!("0.5")), share(json!(1)), share(json!("1e-3"))], [Some(0.5), Some(1.0), Some(0.001)]);
        let is_on = |value: Value| read(json!({"is_on": value})).and_then(|asked| asked.is_on);
        assert_eq!([is_on(json!("True")), is_on(json!(1)), is_on(json!("off"))], [Some(true), Some(true), Some(false)]);
        let seed = |value: Value| read(json!({"seed": value})).and_then(|asked| asked.seed);
        assert_eq!([seed(json!("-7")), seed(json!(-7.0))], [Some(-7); 2]);
        assert_eq!(read(json!({"text": "16"})).and_then(|asked| asked.text).as_deref(), Some("16"), "a string is kept");
    }

    #[test]
    fn invalid_numbers_booleans_and_strings_are_refused() {
        for wrong in [
            json!({"count": 16.5}),
            json!({"count": "sixteen"}),
            json!({"count": ""}),
            json!({"count": -1}),
            json!({"count": "-1.0"}),
            json!({"count": 1e300}),
            json!({"count": true}),
            json!({"count": [16]}),
            json!({"seed": "99999999999999999999"}),
            json!({"share": "nan"}),
            json!({"share": "inf"}),
            json!({"share": "1e999"}),
            json!({"share": "0x1"}),
            json!({"is_on": 2}),
            json!({"is_on": "maybe"}),
            json!({"text": 16}),
        ] {
            assert_eq!(read(wrong.clone()), None, "{wrong}");
        }
    }
}
