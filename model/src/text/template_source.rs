//! The sources of a checkpoint's chat templates: a Jinja file, a JSON file or the tokenizer's
//! settings.

use std::collections::BTreeMap;

use serde_json::Value;

use super::error::TextError;

/// The template for requests that do not name a template.
pub const DEFAULT_TEMPLATE: &str = "default";

/// A checkpoint's chat templates, and the special tokens that they may print.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TemplateSources {
    /// Sources by name. A single unnamed template is called "default".
    pub templates: BTreeMap<String, String>,
    /// Texts of the special tokens in the tokenizer's settings, by name:
    /// `bos_token`, `eos_token`, `pad_token` ...
    pub special_tokens: BTreeMap<String, String>,
}

/// The files that may hold templates.
#[derive(Clone, Copy, Debug, Default)]
pub struct TemplateFiles<'a> {
    /// `chat_template.jinja`
    pub jinja: Option<&'a [u8]>,
    /// `chat_template.json`
    pub json: Option<&'a [u8]>,
    /// `tokenizer_config.json`
    pub tokenizer_config: Option<&'a [u8]>,
}

impl TemplateSources {
    /// Reads the given files. `chat_template.jinja` takes precedence over
    /// `chat_template.json`, which takes precedence over the tokenizer's settings, as
    /// in transformers 5.17 (`ProcessorMixin.from_pretrained`).
    ///
    /// # Errors
    /// [`TextError::TemplateShape`]. A missing template is not an error here;
    /// [`ChatTemplate::render`](super::ChatTemplate::render) reports it.
    pub fn read(files: TemplateFiles<'_>) -> Result<Self, TextError> {
        const SETTINGS: &str = "tokenizer_config.json";
        const JSON: &str = "chat_template.json";
        let settings = files.tokenizer_config.map(|bytes| parse(bytes, SETTINGS)).transpose()?;
        let templates = if let Some(bytes) = files.jinja {
            let source =
                std::str::from_utf8(bytes).map_err(|_| TextError::TemplateShape { file: "chat_template.jinja" })?;
            BTreeMap::from([(DEFAULT_TEMPLATE.to_owned(), source.to_owned())])
        } else if let Some(bytes) = files.json {
            named(parse(bytes, JSON)?.get("chat_template").unwrap_or(&Value::Null), JSON)?
        } else {
            named(
                settings.as_ref().and_then(|settings| settings.get("chat_template")).unwrap_or(&Value::Null),
                SETTINGS,
            )?
        };
        let special_tokens = settings.as_ref().map(special_tokens).unwrap_or_default();
        Ok(TemplateSources { templates, special_tokens })
    }
}

fn parse(bytes: &[u8], file: &'static str) -> Result<Value, TextError> {
    serde_json::from_slice(bytes).map_err(|_| TextError::TemplateShape { file })
}

/// Reads a text, a list of `{"name", "template"}`, or a map from name to text.
fn named(value: &Value, file: &'static str) -> Result<BTreeMap<String, String>, TextError> {
    let shape = || TextError::TemplateShape { file };
    let pair = |name: &Value, source: &Value| match (name, source) {
        (Value::String(name), Value::String(source)) => Ok((name.clone(), source.clone())),
        _ => Err(shape()),
    };
    match value {
        Value::Null => Ok(BTreeMap::new()),
        Value::String(source) => Ok(BTreeMap::from([(DEFAULT_TEMPLATE.to_owned(), source.clone())])),
        Value::Array(list) => list.iter().map(|entry| pair(&entry["name"], &entry["template"])).collect(),
        Value::Object(map) => map.iter().map(|(name, source)| pair(&Value::String(name.clone()), source)).collect(),
        _ => Err(shape()),
    }
}

/// Reads each `*_token` setting, which is a text or an object with the text as `content`. Missing
/// and null tokens stay undefined.
fn special_tokens(settings: &Value) -> BTreeMap<String, String> {
    let entries = settings.as_object().into_iter().flatten();
    let tokens = entries.filter(|(name, _)| name.ends_with("_token")).filter_map(|(name, value)| {
        let content = value.as_str().or_else(|| value.get("content")?.as_str())?;
        Some((name.clone(), content.to_owned()))
    });
    tokens.collect()
}
