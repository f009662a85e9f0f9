//! The models of a server, by the names that clients use.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError, RwLock},
};

use bursar::ModelHandle;

use super::{error::ApiError, id};

/// State of a model on a server.
#[derive(Clone)]
#[non_exhaustive]
pub enum ModelState {
    /// The model is loading. The text describes the current phase for people.
    Loading(Arc<str>),
    /// The model accepts requests.
    Ready(ModelHandle),
    /// The model could not be loaded, for this reason. The model is not listed, and requests for
    /// it get 404.
    Failed(Arc<str>),
}

impl ModelState {
    /// Name of the state in `/v1/models`. For a model that is `Ready`, `/health` reports the state
    /// in the runtime instead, such as `restarting` or `stopped`.
    pub(super) fn name(&self) -> &'static str {
        match self {
            ModelState::Loading(_) => "loading",
            ModelState::Ready(model) if model.is_asleep().is_some() => "asleep",
            ModelState::Ready(_) => "ready",
            ModelState::Failed(_) => "failed",
        }
    }

    /// Returns the phase of loading or the reason of the failure, for people.
    pub(super) fn detail(&self) -> Option<&str> {
        match self {
            ModelState::Loading(detail) | ModelState::Failed(detail) => Some(detail),
            ModelState::Ready(_) => None,
        }
    }
}

#[derive(Clone)]
pub(super) struct Entry {
    /// The model's own name, followed by its other names. Requests may use any of them.
    pub(super) names: Arc<[String]>,
    /// Since when the server lists the model, in seconds since 1970 (Unix time).
    pub(super) created: u64,
    pub(super) state: ModelState,
}

impl Entry {
    /// Whether the model accepts requests or is loading.
    pub(super) fn is_listed(&self) -> bool {
        !matches!(self.state, ModelState::Failed(_))
    }
}

/// All models, in the order in which they were added.
#[derive(Default)]
pub(super) struct Models {
    entries: RwLock<Vec<Entry>>,
    /// Names that requests may use but that are not listed, with the first name of their model.
    aliases: RwLock<BTreeMap<String, String>>,
}

impl Models {
    /// Adds a model or updates its state. A model with the same first name is replaced.
    pub(super) fn set(&self, names: Vec<String>, state: ModelState) {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        match entries.iter_mut().find(|entry| entry.names.first() == names.first()) {
            Some(entry) => (entry.names, entry.state) = (names.into(), state),
            None => entries.push(Entry { names: names.into(), created: id::now(), state }),
        }
    }

    /// Adds the name `alias` for the model `of`. A model that has this name takes precedence.
    pub(super) fn alias(&self, alias: String, of: String) {
        self.aliases.write().unwrap_or_else(PoisonError::into_inner).insert(alias, of);
    }

    /// Returns the name of a model for people. An alias is preferred, because the first name may
    /// be a path.
    pub(super) fn shown(&self, entry: &Entry) -> String {
        let aliases = self.aliases.read().unwrap_or_else(PoisonError::into_inner);
        let alias = aliases.iter().find(|(_, of)| **of == entry.names[0]).map(|(alias, _)| alias);
        alias.unwrap_or(&entry.names[0]).clone()
    }

    pub(super) fn all(&self) -> Vec<Entry> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Finds a model that is ready. Also returns the model's name for responses, which is the name
    /// that the client used. If the client named no model, finds the only model of the server.
    pub(super) fn ready(&self, name: Option<&str>) -> Result<(String, ModelHandle), ApiError> {
        let entry = self.find(name)?;
        let own = &entry.names[0];
        match entry.state {
            ModelState::Ready(model) => Ok((name.filter(|name| !name.is_empty()).unwrap_or(own).to_owned(), model)),
            ModelState::Loading(what) => {
                let message = format!("the model `{own}` is still loading: {what}");
                Err(ApiError::loading(message).code("model_loading").hint("try again in a few seconds"))
            }
            ModelState::Failed(why) => Err(self.failed(own, &why)),
        }
    }

    /// Finds a model that is ready or loading.
    pub(super) fn listed(&self, name: &str) -> Result<Entry, ApiError> {
        let entry = self.find(Some(name))?;
        match &entry.state {
            ModelState::Failed(why) => Err(self.failed(&entry.names[0], why)),
            _ => Ok(entry),
        }
    }

    /// Returns the error for a model that failed to load. For clients, such a model does not exist.
    fn failed(&self, own: &str, why: &str) -> ApiError {
        let message = format!("the model `{own}` is not available, because it failed to load: {why}");
        ApiError::not_found(message).code("model_not_found").hint(known(&self.all()))
    }

    fn find(&self, name: Option<&str>) -> Result<Entry, ApiError> {
        let entries = self.all();
        let found = match name.filter(|name| !name.is_empty()) {
            Some(name) => {
                let named = |name: &str| entries.iter().find(|entry| entry.names.iter().any(|own| own == name));
                let aliases = self.aliases.read().unwrap_or_else(PoisonError::into_inner);
                named(name).or_else(|| named(aliases.get(name)?))
            }
            None if entries.len() == 1 => entries.first(),
            None => {
                let mut listed = entries.iter().filter(|entry| entry.is_listed());
                let only = listed.next().filter(|_| listed.next().is_none());
                let missing = || ApiError::invalid("model", "`model` is missing").hint(known(&entries));
                Some(only.ok_or_else(missing)?)
            }
        };
        let missing = || {
            let message = format!("the model `{}` does not exist", shortened(name.unwrap_or_default()));
            ApiError::not_found(message).code("model_not_found").hint(known(&entries))
        };
        found.cloned().ok_or_else(missing)
    }
}

fn known(entries: &[Entry]) -> String {
    let listed = entries.iter().filter(|entry| entry.is_listed());
    let names: Vec<&str> = listed.map(|entry| entry.names[0].as_str()).collect();
    if names.is_empty() {
        "no model is available now".to_owned()
    } else {
        format!("expected one of: {}", names.join(", "))
    }
}

/// Cuts text of a client to a length that fits into a message.
pub(super) fn shortened(text: &str) -> String {
    const CHARACTERS_MAX: usize = 80;
    match text.char_indices().nth(CHARACTERS_MAX) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loading(names: &[&[&str]]) -> Models {
        let models = Models::default();
        for names in names {
            models.set(names.iter().map(|&name| name.to_owned()).collect(), ModelState::Loading("weights".into()));
        }
        models
    }

    #[test]
    fn a_model_name_is_required_only_with_several_models() {
        assert_eq!(loading(&[&["a", "b"]]).find(None).expect("the only model is found").names[0], "a");
        assert_eq!(loading(&[&["a", "b"]]).find(Some("b")).expect("the model is found by its alias").names[0], "a");
        let several = loading(&[&["a"], &["b"]]);
        assert_eq!(several.find(None).map(|_| ()).expect_err("the request must name a model").status, 400);
        let error = several.find(Some("c")).map(|_| ()).expect_err("there is no model c");
        assert_eq!(error.status, 404);
        assert!(error.body(crate::error::Shape::OpenAi).to_string().contains("expected one of: a, b"));
    }

    #[test]
    fn a_loading_model_answers_503_with_retry_after() {
        let error = loading(&[&["a"]]).ready(None).map(|_| ()).expect_err("the model is still loading");
        assert_eq!(error.status, 503);
        assert!(error.response(crate::error::Shape::OpenAi).headers().contains_key("retry-after"));
    }

    #[test]
    fn a_failed_model_is_not_found_and_other_models_serve() {
        let models = loading(&[&["a"], &["b", "b2"]]);
        models.set(vec!["b".into(), "b2".into()], ModelState::Failed("no such folder".into()));
        for name in ["b", "b2"] {
            for error in [models.ready(Some(name)).map(drop), models.listed(name).map(drop)] {
                let error = error.expect_err("the model failed");
                let message = error.body(crate::error::Shape::OpenAi)["error"].clone();
                assert_eq!((error.status.as_u16(), message["code"].as_str()), (404, Some("model_not_found")));
                let message = message["message"].as_str().unwrap_or_default();
                assert!(message.contains("failed to load: no such folder (expected one of: a)"), "{message}");
            }
        }
        assert_eq!(models.find(None).expect("the only model that serves is found").names[0], "a");
        models.set(vec!["a".into()], ModelState::Failed("neither".into()));
        assert_eq!(models.find(None).map(|_| ()).expect_err("no model serves").status, 400);
    }

    #[test]
    fn model_names_take_precedence_over_aliases() {
        let models = loading(&[&["org/a"], &["b"]]);
        for (alias, of) in [("a", "org/a"), ("b", "org/a"), ("c", "gone")] {
            models.alias(alias.to_owned(), of.to_owned());
        }
        let first = |name: &str| models.find(Some(name)).map(|entry| entry.names[0].clone()).ok();
        assert_eq!((first("a").as_deref(), first("b").as_deref(), first("c")), (Some("org/a"), Some("b"), None));
        assert_eq!(models.shown(&models.all()[0]), "a");
        assert_eq!(models.shown(&models.all()[1]), "b");
    }

    #[test]
    fn a_long_name_is_cut_at_a_character_boundary() {
        assert_eq!(shortened(&"ä".repeat(200)).chars().count(), 81);
    }
}
