//! A JSON object of a settings file, in which unknown keys and values are refused by name.

use serde_json::{Map, Value, json};

use super::error::QuantizationError;
use super::modules::Modules;

/// Maximum number of characters of a value in an error message.
const VALUE_CHARS_MAX: usize = 60;

/// Keys of the settings of quantized weights in compressed-tensors 0.20 (`QuantizationArgs`) that
/// are read or do not change how weights are read.
pub(super) const QUANTIZATION_ARGS: [&str; 11] = [
    "num_bits",
    "type",
    "symmetric",
    "dynamic",
    "actorder",
    "strategy",
    "group_size",
    "scale_dtype",
    "zp_dtype",
    "observer",
    "observer_kwargs",
];

/// A JSON object of a settings file.
pub(super) struct Fields<'c> {
    pub file: &'static str,
    /// The path of the object in the file, with a dot at its end.
    pub place: String,
    pub fields: &'c Map<String, Value>,
}

impl<'c> Fields<'c> {
    /// The object `name` of `fields`, if there is one.
    pub fn part(
        file: &'static str,
        place: &str,
        fields: &'c Map<String, Value>,
        name: &str,
    ) -> Result<Option<Self>, QuantizationError> {
        match fields.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Object(part)) if part.is_empty() => Ok(None),
            Some(Value::Object(part)) => Ok(Some(Fields { file, place: format!("{place}{name}."), fields: part })),
            Some(_) => Err(Fields { file, place: place.to_owned(), fields }.refused(name, "an object")),
        }
    }

    /// The object `name`, which must exist.
    pub fn inner(&self, name: &str) -> Result<Fields<'c>, QuantizationError> {
        Fields::part(self.file, &self.place, self.fields, name)?
            .ok_or_else(|| self.refused(name, "an object that is not empty"))
    }

    pub fn text(&self, name: &str) -> Option<&'c str> {
        self.fields.get(name)?.as_str()
    }

    /// The modules in the lists `names`. A list may be missing.
    pub fn modules(&self, names: &[&str]) -> Result<Modules, QuantizationError> {
        let mut entries = Vec::new();
        for name in names {
            match self.fields.get(*name) {
                None | Some(Value::Null) => {}
                Some(Value::Array(list)) if list.iter().all(Value::is_string) => {
                    entries.extend(list.iter().filter_map(Value::as_str));
                }
                Some(_) => return Err(self.refused(name, "a list of names")),
            }
        }
        Modules::new(self.file, entries)
    }

    /// Refuses number formats other than E4M3.
    pub fn require_e4m3(&self) -> Result<(), QuantizationError> {
        self.require_one_of("num_bits", &[json!(8)], "8")?;
        self.require_one_of("type", &[json!("float")], "float")?;
        self.require_one_of("symmetric", &[json!(true), Value::Null], "true")
    }

    /// Refuses a value that is not in `accepted`. If `accepted` has null, the key may be missing.
    pub fn require_one_of(
        &self,
        name: &str,
        accepted: &[Value],
        supported: &'static str,
    ) -> Result<(), QuantizationError> {
        if accepted.contains(self.fields.get(name).unwrap_or(&Value::Null)) {
            Ok(())
        } else {
            Err(self.refused(name, supported))
        }
    }

    /// Refuses keys that are not in `known`, unless their value is null, false or empty.
    pub fn refuse_unknown_keys(&self, known: &[&str]) -> Result<(), QuantizationError> {
        let is_none = |value: &Value| match value {
            Value::Null | Value::Bool(false) => true,
            Value::Object(fields) => fields.is_empty(),
            Value::Array(list) => list.is_empty(),
            _ => false,
        };
        match self.fields.iter().find(|(key, value)| !known.contains(&key.as_str()) && !is_none(value)) {
            None => Ok(()),
            Some((key, value)) => Err(QuantizationError::Unknown {
                file: self.file,
                field: format!("{}{key}", self.place),
                value: shown(value),
            }),
        }
    }

    pub fn refused(&self, name: &str, supported: &'static str) -> QuantizationError {
        let value = self.fields.get(name).map_or_else(|| "missing".to_owned(), shown);
        QuantizationError::Setting { file: self.file, field: format!("{}{name}", self.place), value, supported }
    }
}

/// A truncated value. A text is shown without quotes.
fn shown(value: &Value) -> String {
    let mut value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    if let Some((end, _)) = value.char_indices().nth(VALUE_CHARS_MAX) {
        value.truncate(end);
        value.push('…');
    }
    value
}
