//! Settings whose value is an object with further settings, and their conversion to single knobs.

use bursar_model::nearest_names;
use serde_json::{Map, Value};

use super::{Knobs, NESTED, error::KnobError, error::described, product::with_products_multiplied};

/// A setting: its full name for errors, the knob's name, and the value.
type Inner = (String, &'static str, Value);

/// The settings inside of `speculative_config`.
const SPECULATIVE: [&str; 6] =
    ["method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "quantization"];

pub(super) fn is_nested(name: &str) -> bool {
    NESTED.iter().any(|nested| nested.name == name)
}

/// Returns the settings inside the object of a nested setting.
///
/// # Errors
/// The object contains an unknown name.
pub(super) fn settings(name: &str, object: &Map<String, Value>) -> Result<Vec<Inner>, KnobError> {
    let mut settings = Vec::new();
    for (inner, value) in object {
        let full = format!("{name}.{inner}");
        match (name, inner.as_str()) {
            ("mm_processor_kwargs", "max_pixels") => settings.push((full, "picture_pixels", value.clone())),
            ("mm_processor_kwargs", "min_pixels") => settings.push((full, "picture_pixels_min", value.clone())),
            ("mm_processor_kwargs", "size") => settings.extend(edges(&full, value)?),
            ("speculative_config", "method") => settings.push((full, "draft_method", value.clone())),
            ("speculative_config", "model") => settings.push((full, "draft_model", value.clone())),
            ("speculative_config", "num_speculative_tokens") => settings.push((full, "draft_tokens", value.clone())),
            ("speculative_config", "prompt_lookup_max") => settings.push((full, "draft_ngram_max", value.clone())),
            ("speculative_config", "prompt_lookup_min") => settings.push((full, "draft_ngram_min", value.clone())),
            ("speculative_config", "quantization") => settings.push((full, "draft_quantization", value.clone())),
            ("limit_mm_per_prompt", "image") => settings.push((full, "pictures", count(value))),
            ("limit_mm_per_prompt", "video") => settings.push(frames(full, value)?),
            ("limit_mm_per_prompt", _) if count(value) == 0 => {}
            ("limit_mm_per_prompt", what) => {
                return Err(KnobError::Modality { value: described(&count(value)), what: what.to_owned(), name: full });
            }
            ("speculative_config", _) => {
                return Err(KnobError::Unknown { name: full, nearest: nearest_names(inner, SPECULATIVE, 1)[0] });
            }
            _ => return Err(KnobError::unknown(&full)),
        }
    }
    Ok(settings)
}

/// Replaces the value at the path of these keys, and keeps everything else.
pub(super) fn replace<'k>(object: &mut Value, keys: impl Iterator<Item = &'k str>, value: Value) {
    let place = keys.fold(object, |object, key| {
        if let Value::String(text) = object {
            *object = serde_json::from_str(text).unwrap_or_default();
        }
        &mut object[key]
    });
    match place.get_mut("count") {
        Some(count) => *count = value,
        None => *place = value,
    }
}

/// Returns the value as an object. Text is parsed first, as JSON or as `name=count` pairs.
///
/// # Errors
/// The value is not an object.
pub(super) fn object(name: &str, value: &Value) -> Result<Map<String, Value>, KnobError> {
    let read = match value {
        Value::String(text) => serde_json::from_str(text)
            .or_else(|_| serde_json::from_str(&with_products_multiplied(text)))
            .ok()
            .or_else(|| pairs(text))
            .unwrap_or(Value::Null),
        value => value.clone(),
    };
    match read {
        Value::Object(object) => Ok(object),
        _ => Err(KnobError::value(name, value, "an object of names and values")),
    }
}

/// Parses vLLM's other notation for an object of counts: `image=4,video=0`.
fn pairs(text: &str) -> Option<Value> {
    let pair = |pair: &str| {
        let (name, count) = pair.split_once('=')?;
        Some((name.trim().to_owned(), Value::from(count.trim().parse::<u64>().ok()?)))
    };
    text.split(',').map(pair).collect::<Option<Map<_, _>>>().map(Value::Object)
}

/// Returns a count. The value is either the count itself or an object with the field `count`, whose
/// other fields are the sizes that vLLM profiles with.
fn count(value: &Value) -> Value {
    value.get("count").unwrap_or(value).clone()
}

fn edges(name: &str, value: &Value) -> Result<Vec<Inner>, KnobError> {
    let knobs = [("longest_edge", "picture_pixels"), ("shortest_edge", "picture_pixels_min")];
    let object = object(name, value)?;
    let setting = |(inner, value): (&String, &Value)| {
        let full = format!("{name}.{inner}");
        match knobs.iter().find(|(edge, _)| edge == inner) {
            Some((_, knob)) => Ok((full, *knob, value.clone())),
            None => Err(KnobError::unknown(&full)),
        }
    };
    object.iter().map(setting).collect()
}

/// Returns the number of frames of all videos together.
fn frames(name: String, value: &Value) -> Result<Inner, KnobError> {
    let number = |value: &Value| value.as_u64();
    let wrong = || KnobError::value(&name, value, "0, or an object of count and num_frames");
    let videos = number(&count(value)).ok_or_else(wrong)?;
    match value.get("num_frames") {
        // Without videos, the number of frames per video does not matter.
        _ if videos == 0 => Ok((name, "video_frames", 0.into())),
        Some(frames) => {
            let frames = number(frames).and_then(|frames| frames.checked_mul(videos)).ok_or_else(wrong)?;
            Ok((name, "video_frames", frames.into()))
        }
        None => Err(KnobError::Videos { name, videos }),
    }
}

impl TryFrom<Map<String, Value>> for Knobs {
    type Error = KnobError;

    fn try_from(map: Map<String, Value>) -> Result<Self, KnobError> {
        Knobs::from_settings(map)
    }
}
