//! Settings of the Hugging Face hub, from the environment variables that all Hugging Face tools
//! read.

use std::{env, fs, path::PathBuf};

use bursar::{HubOptions, LoadOptions};
use bursar_model::checkpoint::CheckpointOrigin;

/// Returns the options with a draft model that is fetched with these settings.
pub fn used_by(load: LoadOptions) -> LoadOptions {
    let draft_model = load.draft_model.map(|origin| match origin {
        CheckpointOrigin::Hub(model) => CheckpointOrigin::Hub(model.with_options(options())),
        origin => origin,
    });
    LoadOptions { draft_model, ..load }
}

pub fn options() -> HubOptions {
    let named = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
    let text = |name: &str| named(name).and_then(|value| value.into_string().ok());
    let home = named("HF_HOME").map(PathBuf::from);
    let home = home.or_else(|| named("XDG_CACHE_HOME").map(|cache| PathBuf::from(cache).join("huggingface")));
    let kept = named("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| Some(home.as_ref()?.join("token")));
    let kept = || fs::read_to_string(kept.as_ref()?).ok().map(|token| token.trim().to_owned());
    let is_set = |name: &str| text(name).is_some_and(|set| ["1", "on", "yes", "true"].contains(&&*set.to_lowercase()));
    let own = HubOptions::default();
    HubOptions {
        endpoint: text("HF_ENDPOINT").unwrap_or(own.endpoint),
        token: text("HF_TOKEN").or_else(|| text("HUGGING_FACE_HUB_TOKEN")).or_else(kept),
        cache: named("HF_HUB_CACHE")
            .or_else(|| named("HUGGINGFACE_HUB_CACHE"))
            .map(PathBuf::from)
            .or_else(|| Some(home.as_ref()?.join("hub"))),
        is_offline: is_set("HF_HUB_OFFLINE") || is_set("TRANSFORMERS_OFFLINE"),
        proxy: text("HTTPS_PROXY").or_else(|| text("https_proxy")),
        revision: None,
    }
}
