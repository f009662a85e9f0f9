//! The names by which a user set knobs, for errors and suggestions.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Peer, TABLE, nested};

/// The names by which knobs were set, so that a suggestion uses the same name as the user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names(BTreeMap<&'static str, TypedSetting>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct TypedSetting {
    /// The name that the user used, or the path inside an object.
    name: String,
    /// The object that contains the knob, if the knob was set inside an object.
    object: Option<Value>,
}

/// A name with its value, as in JSON.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    pub name: String,
    /// The value, which is an object if the name sets several knobs.
    pub value: Value,
}

impl Names {
    /// Records that the user set this knob by `name`, inside `object` if the knob was set inside an
    /// object.
    pub(super) fn insert(&mut self, knob: &'static str, name: String, object: Option<Value>) {
        self.0.insert(knob, TypedSetting { name, object });
    }

    /// The names of an earlier version that the user used, each with the name that replaces it.
    pub fn former(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let former = TABLE.iter().flat_map(|knob| {
            let former = knob.aliases.iter().filter(|alias| alias.of == Peer::Former);
            former.map(|alias| (alias.name, knob.name))
        });
        former.filter(|(former, now)| self.of(now) == Some(former))
    }

    /// Returns the name by which the user set this knob, or the path if the knob was set inside an
    /// object, such as `limit_mm_per_prompt.image`. `None` if the knob was not set.
    pub fn of(&self, knob: &str) -> Option<&str> {
        self.0.get(knob).map(|requested| requested.name.as_str())
    }

    /// Returns the setting that sets this knob to `value`, by the name that the user used. If the
    /// knob was set inside an object, the rest of that object is kept.
    pub fn setting(&self, knob: &str, value: Value) -> Setting {
        match self.0.get(knob) {
            None => Setting { name: knob.to_owned(), value },
            Some(TypedSetting { name, object: None }) => Setting { name: name.clone(), value },
            Some(TypedSetting { name, object: Some(object) }) => {
                let (mut object, mut keys) = (object.clone(), name.split('.'));
                let outer = keys.next().unwrap_or_default().to_owned();
                nested::replace(&mut object, keys, value);
                Setting { name: outer, value: object }
            }
        }
    }
}
