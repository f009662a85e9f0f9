//! Recent events, which the process serves in addition to its metrics.

use bursar::Bytes;
use serde::Serialize;
use serde_json::{Map, Value};

use super::exposition::harmless;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Event {
    /// The event's number among all events of the process.
    pub number: u64,
    /// Unix time in seconds. NaN if missing.
    pub at: f64,
    /// The kind of event, such as `lease_granted`.
    pub kind: String,
    /// A description of the event, in one line.
    pub text: String,
    pub weight: Weight,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Weight {
    Usual,
    /// Memory changed owners, or a model became ready or stopped.
    Notable,
    /// A problem that the user should look at.
    Bad,
}

/// The reason why an answer is not a list of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoEvents {
    #[error("column {column} of line {line} is not JSON")]
    NotJson { line: usize, column: usize },
    /// Valid JSON that is not a list of events.
    #[error("the answer is not a JSON array of objects with a number and an event")]
    OtherJson,
}

/// Parses a JSON array of events, the oldest first.
///
/// # Errors
/// Returns [`NoEvents`] if the text is not such an array. Unknown kinds and fields are accepted.
pub fn read(text: &str) -> Result<Vec<Event>, NoEvents> {
    let list: Vec<Value> = serde_json::from_str(text).map_err(|error| match error.classify() {
        serde_json::error::Category::Data => NoEvents::OtherJson,
        _ => NoEvents::NotJson { line: error.line(), column: error.column() },
    })?;
    list.into_iter().map(|value| Event::of(value).ok_or(NoEvents::OtherJson)).collect()
}

impl Event {
    fn of(value: Value) -> Option<Self> {
        let Value::Object(mut fields) = value else { return None };
        let number = fields.remove("number")?.as_u64()?;
        let kind = harmless(fields.remove("event")?.as_str()?);
        let at = match fields.remove("at") {
            Some(Value::Number(at)) => at.as_f64(),
            Some(Value::String(at)) => at.parse().ok(),
            _ => None,
        };
        let text = text_of(&kind, &fields).unwrap_or_else(|| all(&fields));
        Some(Event { number, at: at.unwrap_or(f64::NAN), weight: Weight::of(&kind), text, kind })
    }

    /// Returns the kind in words.
    pub fn title(&self) -> String {
        self.kind.replace('_', " ")
    }
}

impl Weight {
    fn of(kind: &str) -> Self {
        match kind {
            "lease_refused" | "canary_given" | "oom" | "restart" | "failed" | "device_lost" => Weight::Bad,
            "lease_revoked" | "shrink" | "growth" | "canary_taken" | "ready" | "stopped" => Weight::Notable,
            _ => Weight::Usual,
        }
    }
}

/// Returns the sentence for a known kind, if it has the expected fields.
fn text_of(kind: &str, fields: &Map<String, Value>) -> Option<String> {
    let word = |name: &str| fields.get(name).map(text);
    let bytes = |name: &str| fields.get(name)?.as_u64().map(Bytes);
    let of_model = |what: String| match word("model") {
        Some(model) if !model.is_empty() => format!("{what} of {model}"),
        _ => what,
    };
    let for_card = || word("card").map_or(String::new(), |card| format!(", for {card}"));
    Some(match kind {
        "lease_granted" | "lease_revoked" | "lease_freed" => {
            format!("{}, {}", of_model(word("class")?), bytes("bytes")?)
        }
        "lease_refused" => format!("{}, {}: {}", of_model(word("class")?), bytes("bytes")?, word("reason")?),
        "lease_resized" => format!("{}, {} to {}", of_model(word("class")?), bytes("from")?, bytes("to")?),
        "canary_given" | "canary_taken" => format!("{}{}", bytes("bytes")?, for_card()),
        "shrink" | "growth" => {
            let (model, from, to) = (word("model")?, word("from_blocks")?, word("to_blocks")?);
            format!("{model}, {from} to {to} blocks{}", for_card())
        }
        "oom" => format!("{} while in {}", word("model")?, word("phase")?),
        "restart" => format!("{}: {}", of_model(word("actor")?), word("reason")?),
        "ranks_chosen" => word("reason")?,
        "ready" => format!("{}, KV cache of {} tokens", word("model")?, word("kv_tokens")?),
        "failed" | "stopped" => format!("{}: {}", word("model")?, word("reason")?),
        "device_lost" => word("device").or_else(|| word("reason"))?,
        _ => return None,
    })
}

/// Lists all fields by name.
fn all(fields: &Map<String, Value>) -> String {
    let each = fields.iter().map(|(name, value)| format!("{} {}", harmless(name), text(value)));
    each.collect::<Vec<_>>().join(", ")
}

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => harmless(text),
        Value::Null => String::new(),
        value => harmless(&value.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn known_event_kinds_have_sentences_and_unknown_kinds_list_fields() {
        let cases = [
            (r#""event":"lease_granted","lease":3,"model":"demo","class":"kv","bytes":2097152"#, "kv of demo, 2.0 MiB"),
            (r#""event":"lease_freed","lease":3,"model":"","class":"tenant","bytes":1024"#, "tenant, 1.0 KiB"),
            (r#""event":"lease_refused","class":"tenant","bytes":4,"reason":"full""#, "tenant, 4 B: full"),
            (
                r#""event":"lease_resized","lease":3,"model":"a","class":"kv","from":1024,"to":0"#,
                "kv of a, 1.0 KiB to 0 B",
            ),
            (r#""event":"canary_given","bytes":1048576"#, "1.0 MiB"),
            (r#""event":"shrink","model":"demo","from_blocks":9,"to_blocks":4"#, "demo, 9 to 4 blocks"),
            (
                r#""event":"shrink","model":"demo","from_blocks":9,"to_blocks":4,"card":"cuda:1""#,
                "demo, 9 to 4 blocks, for cuda:1",
            ),
            (r#""event":"canary_given","bytes":1048576,"card":"cuda:1""#, "1.0 MiB, for cuda:1"),
            (r#""event":"oom","model":"demo","phase":"serve""#, "demo while in serve"),
            (r#""event":"restart","model":"demo","actor":"vision","reason":"killed""#, "vision of demo: killed"),
            (r#""event":"restart","model":null,"actor":"budget","reason":"killed""#, "budget: killed"),
            (r#""event":"ready","model":"demo","kv_tokens":64"#, "demo, KV cache of 64 tokens"),
            (r#""event":"stopped","model":"demo","reason":"unloaded""#, "demo: unloaded"),
            (r#""event":"device_lost","device":"cuda:0""#, "cuda:0"),
            (r#""event":"device_lost","reason":"Xid 79""#, "Xid 79"),
            (r#""event":"moved","to":"host","bytes":[1]"#, "bytes [1], to host"),
            (r#""event":"oom","model":"only""#, "model only"),
        ];
        for (fields, expected) in cases {
            let events = read(&format!("[{{\"number\":17,\"at\":1700000000.25,{fields}}}]")).expect(fields);
            assert_eq!((events[0].text.as_str(), events[0].number, events[0].at), (expected, 17, 1700000000.25));
        }
        assert_eq!(read("[]"), Ok(Vec::new()));
    }

    #[test]
    fn a_malformed_list_of_events_is_reported_without_its_content() {
        assert_eq!(read("[{\"secret"), Err(NoEvents::NotJson { line: 1, column: 9 }));
        for text in
            ["{}", "[1]", "[{\"number\":1}]", "[{\"number\":-1,\"event\":\"a\"}]", "[{\"number\":1,\"event\":2}]"]
        {
            assert_eq!(read(text), Err(NoEvents::OtherJson), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_input_panics_or_sends_control_characters_to_the_terminal(text in "(?s).{0,60}", at in ".{0,8}") {
            let _ = read(&text);
            let event = serde_json::json!([{ "number": 1, "at": at, "event": text, "model": text, "field": [text] }]);
            let events = read(&event.to_string()).expect("the event is valid");
            let shown = format!("{}{}", events[0].title(), events[0].text);
            prop_assert!(!shown.chars().any(char::is_control));
        }
    }
}
