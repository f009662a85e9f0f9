//! Fields that clients send in two forms.

use std::{borrow::Cow, fmt, marker::PhantomData};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{
        Error, MapAccess, SeqAccess, Visitor,
        value::{MapAccessDeserializer, SeqAccessDeserializer},
    },
};

/// A list. Clients may send a single string instead of a list with one item. Unlike with an
/// untagged enum, errors name the wrong item.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct OneOrMany<T>(pub(super) Vec<T>);

impl<T: Serialize> Serialize for OneOrMany<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de, T: Deserialize<'de> + From<String>> Deserialize<'de> for OneOrMany<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de> + From<String>> Visitor<'de> for Either<T> {
            type Value = OneOrMany<T>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string or a list")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<OneOrMany<T>, E> {
                Ok(OneOrMany(vec![T::from(text.to_owned())]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<OneOrMany<T>, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(items)).map(OneOrMany)
            }
        }
        deserializer.deserialize_any(Either(PhantomData))
    }
}

impl<T: JsonSchema> JsonSchema for OneOrMany<T> {
    fn schema_name() -> Cow<'static, str> {
        format!("TextOrListOf{}", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let items = generator.subschema_for::<T>();
        json_schema!({"anyOf": [{"type": "string"}, {"type": "array", "items": items}]})
    }
}

/// An object. Clients may send a string instead, which `T::from` converts to an object whose only
/// field is this string.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Wrapped<T>(pub(super) T);

impl<'de, T: Deserialize<'de> + From<String>> Deserialize<'de> for Wrapped<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de> + From<String>> Visitor<'de> for Either<T> {
            type Value = Wrapped<T>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string or an object")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Wrapped<T>, E> {
                Ok(Wrapped(T::from(text.to_owned())))
            }

            fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<Wrapped<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(fields)).map(Wrapped)
            }
        }
        deserializer.deserialize_any(Either(PhantomData))
    }
}

impl<T: JsonSchema> JsonSchema for Wrapped<T> {
    fn schema_name() -> Cow<'static, str> {
        format!("TextOr{}", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let object = generator.subschema_for::<T>();
        json_schema!({"anyOf": [{"type": "string"}, object]})
    }
}
