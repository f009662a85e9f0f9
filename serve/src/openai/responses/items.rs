//! Items of a conversation.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::one_or_many::OneOrMany;

/// An item of a conversation. `type` determines which of the other fields are used.
#[derive(Default, Deserialize, Serialize, JsonSchema)]
pub(crate) struct Item {
    /// Type of the item. `message` by default.
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) role: Option<String>,
    pub(super) content: Option<OneOrMany<ContentPart>>,
    pub(super) summary: Option<Vec<ContentPart>>,
    pub(super) call_id: Option<String>,
    pub(super) name: Option<String>,
    pub(super) arguments: Option<String>,
    /// Namespace of the called function.
    pub(super) namespace: Option<String>,
    /// Input of a call of a custom tool.
    pub(super) input: Option<String>,
    pub(super) output: Option<OneOrMany<ContentPart>>,
}

#[derive(Default, Deserialize, Serialize, JsonSchema)]
#[schemars(rename = "ResponsesPart")]
pub(super) struct ContentPart {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) text: Option<String>,
    pub(super) refusal: Option<String>,
    pub(super) image_url: Option<String>,
    /// `low` makes the picture coarser.
    pub(super) detail: Option<String>,
}

impl From<String> for ContentPart {
    fn from(text: String) -> Self {
        ContentPart { kind: "input_text".to_owned(), text: Some(text), ..ContentPart::default() }
    }
}

impl From<String> for Item {
    fn from(text: String) -> Self {
        Item {
            role: Some("user".to_owned()),
            content: Some(OneOrMany(vec![ContentPart::from(text)])),
            ..Item::default()
        }
    }
}

impl Item {
    /// JSON of the item for clients, with this id.
    pub(super) fn listed(&self, id: &str) -> Value {
        let mut listed = json!(self);
        if let Some(fields) = listed.as_object_mut() {
            fields.retain(|_, value| !value.is_null());
            fields.insert("id".to_owned(), id.into());
            fields.entry("type").or_insert_with(|| "message".into());
            for list in ["content", "summary", "output"] {
                let parts = fields.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten();
                parts.filter_map(Value::as_object_mut).for_each(|part| part.retain(|_, value| !value.is_null()));
            }
        }
        listed
    }
}
