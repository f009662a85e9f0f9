//! What a server allows its clients.

use std::{path::PathBuf, time::Duration};

use super::guard::{self, KeyError};
use crate::Bytes;

/// The limits of a [`Service`](super::Service) and a [`Server`](super::Server). Each has a default that suits one GPU and clients that
/// are not trusted.
#[derive(Clone)]
pub struct ServeOptions {
    /// Keys of clients. Without any, everybody who reaches the port is served.
    pub keys: Vec<String>,
    /// Keys of administrators, who may also put models to sleep, wake them, run drills, and read the budget of a
    /// server with several `keys`. Without any, every client is an administrator if the server has no `keys` and
    /// listens only on this machine, or if [`open_admin`](Self::open_admin) is set; otherwise no client is.
    pub admin_keys: Vec<String>,
    /// Whether every client is an administrator where there are no `admin_keys`.
    pub open_admin: bool,
    /// The largest body of a request; larger ones are refused with 413. Pictures travel in base64, so they take a third more.
    pub body_bytes: Bytes,
    /// Bodies that are held at once, all clients together. More are refused with 503.
    pub bodies_bytes: Bytes,
    /// The time that a client has to send a whole body.
    pub body_time: Duration,
    /// The time that a client has to send the head of a request, and how long an idle connection is kept.
    pub head_time: Duration,
    /// The largest head of a request; larger ones are refused with 431.
    pub head_bytes: Bytes,
    /// Maximum concurrent connections. Connections above the limit get 503 for everything except health and metrics.
    pub connections: usize,
    /// The same for connections from one address, or from one /64 network of IPv6.
    pub connections_per_address: usize,
    /// Replies at once for each key; more are refused with 429. None: as many as the models take.
    pub streams_per_key: Option<usize>,
    /// Silence after which a stream gets a comment, so that proxies keep it open.
    pub keep_alive: Duration,
    /// How long running replies may take when the server ends.
    pub drain: Duration,
    /// Responses of `/v1/responses` that are kept, in memory alone. The oldest go first.
    pub responses: usize,
    /// The bytes of all kept responses and their conversations, pictures included.
    pub responses_bytes: Bytes,
    /// Hosts that pictures may be fetched from, such as `example.org` or `example.org:8443`. None by default.
    pub url_hosts: Vec<String>,
    /// Whether these hosts may have private addresses, for example in a company's internal network. Not by default: a name
    /// that anybody controls may point at the server's neighbours.
    pub private_url_hosts: bool,
    /// The folder that `file:` URLs of pictures and videos may name files of. None by default.
    pub media_root: Option<PathBuf>,
    /// How long reading a file below `media_root` may take.
    pub media_time: Duration,
    /// The program `ffmpeg`, which decodes films in MP4, MOV, WebM and MKV. Without it they are refused; animated GIF and
    /// WebP need none. None by default.
    pub ffmpeg: Option<PathBuf>,
    /// How long decoding a film may take.
    pub film_time: Duration,
    /// Whether `/metrics` also has the series of vLLM that dashboards and autoscalers read.
    pub vllm_metrics: bool,
    /// Variables that chat templates read, such as `enable_thinking`, unless a request sets them.
    pub template_variables: serde_json::Map<String, serde_json::Value>,
    /// Optional path prefix of requests, without slashes at its ends, for a proxy that does not strip it: `llm` for
    /// `/llm/v1/models`. Empty for no prefix.
    pub root_path: String,
    /// Origins of web pages that may ask, such as `https://example.org`, or `*` for all.
    pub origins: Vec<String>,
}

impl ServeOptions {
    /// Adds the keys of a text, one a line. Empty lines and those that begin with `#` are none.
    ///
    /// # Errors
    /// [`KeyError`], with the line.
    pub fn with_keys(mut self, text: &str) -> Result<Self, KeyError> {
        self.keys.extend(guard::keys_of(text)?);
        Ok(self)
    }

    /// As [`with_keys`](Self::with_keys), for keys of administrators.
    ///
    /// # Errors
    /// [`KeyError`], with the line.
    pub fn with_admin_keys(mut self, text: &str) -> Result<Self, KeyError> {
        self.admin_keys.extend(guard::keys_of(text)?);
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
            film_time: Duration::from_secs(30),
            vllm_metrics: false,
            template_variables: serde_json::Map::new(),
            root_path: String::new(),
            origins: Vec::new(),
        }
    }
}
