//! Settings of the hub from the environment variables that all Hugging Face tools read.

use std::{env, path::PathBuf};

use bursar::HubOptions;

/// Endpoint, token, cache and proxy.
pub fn options() -> HubOptions {
    let named = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
    let text = |name: &str| named(name).and_then(|value| value.into_string().ok());
    let home = || named("HF_HOME").map(|home| PathBuf::from(home).join("hub"));
    let own = HubOptions::default();
    HubOptions {
        endpoint: text("HF_ENDPOINT").unwrap_or(own.endpoint),
        token: text("HF_TOKEN"),
        cache: named("HF_HUB_CACHE").map(PathBuf::from).or_else(home),
        proxy: text("HTTPS_PROXY").or_else(|| text("https_proxy")),
        revision: None,
    }
}
