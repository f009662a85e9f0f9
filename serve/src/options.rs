//! Options of a server.

use std::{path::PathBuf, time::Duration};

use bursar::{Bytes, Hint};

/// Why a list of API keys cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The list contains no key.
    #[error("the list of keys is empty")]
    None,
    /// A key is empty or contains characters that are not allowed in an HTTP header.
    #[error("the key on line {line} is empty or has characters that are not allowed in a header")]
    Unsendable {
        /// Line of the key in the list, starting at 1.
        line: usize,
    },
}

impl Hint for KeyError {
    type Text = String;

    fn hint(&self) -> String {
        "write one key per line, with letters, digits and punctuation only".to_owned()
    }
}

/// Options of a [`Service`](super::Service) and a [`Server`](super::Server). The defaults suit one
/// GPU and clients that are not trusted.
#[derive(Clone)]
pub struct ServeOptions {
    /// API keys of clients. Without keys, every client that reaches the port is served.
    pub keys: Vec<String>,
    /// Keys of administrators. Administrators may also put models to sleep, wake them, run drills,
    /// and read the budget of a server with several `keys`. Without administrator keys, every
    /// client is an administrator if the server has no `keys` and listens only on this machine, or
    /// if [`open_admin`](Self::open_admin) is set; otherwise no client is an administrator.
    pub admin_keys: Vec<String>,
    /// Whether every client is an administrator if there are no `admin_keys`.
    pub open_admin: bool,
    /// Largest request body. Larger bodies get 413. Pictures in a body are in base64, which is a
    /// third larger than the file. Default: 64 MiB.
    pub body_bytes: Bytes,
    /// Memory for the bodies of all concurrent requests, and for pictures and videos that are read
    /// for them. Requests that would exceed this memory get 503. Default: 1 GiB.
    pub bodies_bytes: Bytes,
    /// Time that a client has to send a whole body. A client that stops reading its response is
    /// disconnected after the same time. Default: 60 s.
    pub body_time: Duration,
    /// Time that a client has to send the head of a request. An idle connection is closed after the
    /// same time. Default: 15 s.
    pub head_time: Duration,
    /// Largest head of a request, at least 8 KiB. Larger heads get 431. Default: 32 KiB.
    pub head_bytes: Bytes,
    /// Maximum concurrent connections. Up to 64 connections above the limit, at most 8 of them from
    /// one address, get 503 for everything except health and metrics. Further connections are
    /// closed. Default: 4,096.
    pub connections: usize,
    /// Maximum concurrent connections from one address, or from one /64 network of IPv6. Default:
    /// 2,048.
    pub connections_per_address: usize,
    /// Maximum concurrent replies per key, or of all clients together if there are no keys. Further
    /// requests get 429. With `None`, the default, only the models limit concurrent replies.
    pub streams_per_key: Option<usize>,
    /// Time without events after which a stream gets a comment, so that proxies keep it open.
    /// Default: 10 s.
    pub keep_alive: Duration,
    /// Time that running replies have to finish when the server shuts down. Default: 30 s.
    pub drain: Duration,
    /// Maximum number of stored responses of `/v1/responses`. Responses are stored in memory only.
    /// The oldest response of the key that stores the most is evicted first. Running responses and
    /// the newest response are not evicted. Default: 1,024.
    pub responses: usize,
    /// Maximum bytes of all stored responses and their conversations, pictures included. Default:
    /// 256 MiB.
    pub responses_bytes: Bytes,
    /// Hosts that pictures and videos may be fetched from, such as `example.org` or
    /// `example.org:8443`. Empty by default.
    pub url_hosts: Vec<String>,
    /// Whether these hosts may have private addresses, for example in a company's internal network.
    /// `false` by default: the owner of a host name could otherwise point it at other machines in
    /// the server's network.
    pub private_url_hosts: bool,
    /// Folder of the files that `file:` URLs of pictures and videos may name. `None` by default.
    pub media_root: Option<PathBuf>,
    /// Time limit for reading a file below `media_root`. Default: 10 s.
    pub media_time: Duration,
    /// Path of the program `ffmpeg`, which decodes MP4, MOV, WebM and MKV. Without it, such videos
    /// are refused. Animated GIF and WebP do not need it. `None` by default.
    pub ffmpeg: Option<PathBuf>,
    /// Time limit for decoding a video. Default: 30 s.
    pub video_time: Duration,
    /// Whether `/metrics` also has vLLM's series, which dashboards and autoscalers read.
    pub vllm_metrics: bool,
    /// Variables for chat templates, such as `enable_thinking`. A request may override them.
    pub template_variables: serde_json::Map<String, serde_json::Value>,
    /// Optional path prefix of requests, without slashes at its ends, for a proxy that does not
    /// strip it: `llm` for `/llm/v1/models`. Empty for no prefix.
    pub root_path: String,
    /// Origins of web pages that may send requests, such as `https://example.org`, or `*` for all.
    pub origins: Vec<String>,
}

impl ServeOptions {
    /// Adds the keys of a text with one key per line. Empty lines and lines that begin
    /// with `#` are skipped.
    ///
    /// # Errors
    /// [`KeyError`] if the text has no key, or a key that cannot be sent in a header.
    pub fn with_keys(mut self, text: &str) -> Result<Self, KeyError> {
        self.keys.extend(keys_of(text)?);
        Ok(self)
    }

    /// Adds administrator keys, in the format of [`with_keys`](Self::with_keys).
    ///
    /// # Errors
    /// [`KeyError`] if the text has no key, or a key that cannot be sent in a header.
    pub fn with_admin_keys(mut self, text: &str) -> Result<Self, KeyError> {
        self.admin_keys.extend(keys_of(text)?);
        Ok(self)
    }
}

impl Default for ServeOptions {
    fn default() -> Self {
        ServeOptions {
            keys: Vec::new(),
            admin_keys: Vec::new(),
            open_admin: false,
            body_bytes: Bytes::mib(64),
            bodies_bytes: Bytes::gib(1),
            body_time: Duration::from_secs(60),
            head_time: Duration::from_secs(15),
            head_bytes: Bytes::kib(32),
            connections: 4096,
            connections_per_address: 2048,
            streams_per_key: None,
            keep_alive: Duration::from_secs(10),
            drain: Duration::from_secs(30),
            responses: 1024,
            responses_bytes: Bytes::mib(256),
            url_hosts: Vec::new(),
            private_url_hosts: false,
            media_root: None,
            media_time: Duration::from_secs(10),
            ffmpeg: None,
            video_time: Duration::from_secs(30),
            vllm_metrics: false,
            template_variables: serde_json::Map::new(),
            root_path: String::new(),
            origins: Vec::new(),
        }
    }
}

/// Parses one key per line. Empty lines and lines that begin with `#` are skipped.
///
/// # Errors
/// [`KeyError`] if the text has no key, or a key that cannot be sent in a header.
fn keys_of(text: &str) -> Result<Vec<String>, KeyError> {
    let lines = text.lines().map(str::trim).enumerate();
    let keys: Vec<_> = lines.filter(|(_, key)| !key.is_empty() && !key.starts_with('#')).collect();
    if let Some((line, _)) = keys.iter().find(|(_, key)| !key.bytes().all(|byte| byte.is_ascii_graphic())) {
        return Err(KeyError::Unsendable { line: line + 1 });
    }
    if keys.is_empty() {
        return Err(KeyError::None);
    }
    Ok(keys.into_iter().map(|(_, key)| key.to_owned()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_files_have_one_sendable_key_per_line() {
        assert_eq!(keys_of("# ours\n one \n\ntwo\n"), Ok(vec!["one".to_owned(), "two".to_owned()]));
        assert_eq!(keys_of("# ours\n"), Err(KeyError::None));
        assert_eq!(keys_of("one\nt wo"), Err(KeyError::Unsendable { line: 2 }));
    }
}
