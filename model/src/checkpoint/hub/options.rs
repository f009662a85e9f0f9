//! Options for access to the hub: address, credentials, proxy and cache.

use std::path::PathBuf;

const ENDPOINT: &str = "https://huggingface.co";

/// The hub's address, credentials, and the cache for its files.
#[derive(Clone, PartialEq, Eq)]
pub struct HubOptions {
    /// The hub's address, `https://huggingface.co` by default.
    pub endpoint: String,
    /// Access token for gated and private models. The default is the token that `hf auth login`
    /// stores next to the cache.
    pub token: Option<String>,
    /// The folder of the cache, `~/.cache/huggingface/hub` by default.
    pub cache: Option<PathBuf>,
    /// A branch, tag or commit. A revision after the id's `@` takes precedence.
    pub revision: Option<String>,
    /// The address of a proxy for all requests.
    pub proxy: Option<String>,
    /// Whether only the cache is used, without any request to the hub.
    pub is_offline: bool,
}

/// The public hub and the user's own cache.
impl Default for HubOptions {
    fn default() -> Self {
        HubOptions {
            endpoint: ENDPOINT.into(),
            token: None,
            cache: None,
            revision: None,
            proxy: None,
            is_offline: false,
        }
    }
}

/// Omits the token and the proxy's address, which may contain a password.
impl std::fmt::Debug for HubOptions {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("HubOptions")
            .field("endpoint", &self.endpoint)
            .field("has_token", &self.token.is_some())
            .field("cache", &self.cache)
            .field("revision", &self.revision)
            .field("has_proxy", &self.proxy.is_some())
            .finish()
    }
}
