//! Requests to the hub: the description of a file, and its download. Every header is checked before
//! it becomes part of a path.

use std::io::{Read, Write};
use std::time::Duration;

use bursar_budgets::Bytes;
use ureq::config::RedirectAuthHeaders;
use ureq::http::{HeaderMap, Response, Uri, header};
use ureq::{Agent, Body};

use super::cache::{Blob, failed};
use super::{HubError, HubOptions};
use crate::checkpoint::fetch_watch::FetchWatch;

/// Maximum number of bytes per read.
const PIECE_BYTES: usize = 256 << 10;
/// Bytes of a file between two reports to the watch.
const REPORT_BYTES: u64 = 4 << 20;
/// Timeout of each network operation. A cancelled fetch ends within this time.
const IO_TIMEOUT: Duration = Duration::from_secs(30);
/// Redirects within the hub: enough for a model that was renamed twice.
const REDIRECTS_MAX: usize = 4;
/// Number of consecutive connections without a new byte after which the download fails.
const STALLED_CONNECTIONS_MAX: usize = 3;

/// The hub's description of a file.
#[derive(Debug)]
pub(super) struct RemoteFile {
    pub commit: String,
    pub etag: String,
    pub bytes: u64,
}

/// A repository on the hub.
pub(super) struct Remote<'a> {
    agent: Agent,
    endpoint: &'a str,
    id: &'a str,
    authorization: Option<String>,
    watch: &'a dyn FetchWatch,
    is_offline: bool,
}

impl<'a> Remote<'a> {
    pub fn new(
        options: &'a HubOptions,
        id: &'a str,
        kept_token: Option<String>,
        watch: &'a dyn FetchWatch,
    ) -> Result<Self, HubError> {
        let proxy = options.proxy.as_deref().map(ureq::Proxy::new).transpose().map_err(|_| HubError::Proxy)?;
        let agent = Agent::config_builder()
            // Without this call, the library would use a proxy from the environment.
            .proxy(proxy)
            .user_agent(concat!("bursar/", env!("CARGO_PKG_VERSION")))
            .http_status_as_error(false)
            // The token is sent only to the hub. Its file servers get signed URLs instead.
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .timeout_resolve(Some(IO_TIMEOUT))
            .timeout_connect(Some(IO_TIMEOUT))
            .timeout_recv_response(Some(IO_TIMEOUT))
            .timeout_per_read(Some(IO_TIMEOUT))
            .timeout_per_write(Some(IO_TIMEOUT))
            .build()
            .new_agent();
        let token = options.token.clone().or(kept_token);
        Ok(Remote {
            agent,
            endpoint: options.endpoint.trim_end_matches('/'),
            id,
            authorization: token.map(|token| format!("Bearer {}", token.trim())),
            watch,
            is_offline: options.is_offline,
        })
    }

    pub fn repository(&self) -> &str {
        self.id
    }

    /// The hub's description of a file at a revision; `None` if the repository has no such file.
    pub fn find(&self, file: &str, revision: &str) -> Result<Option<RemoteFile>, HubError> {
        self.check_cancelled()?;
        if self.is_offline {
            return Err(HubError::Offline { file: file.to_owned() });
        }
        let mut address = self.address(file, revision);
        for _ in 0..=REDIRECTS_MAX {
            let mut request = self.agent.head(&address).config().max_redirects(0).build();
            if let Some(authorization) = &self.authorization {
                request = request.header(header::AUTHORIZATION, authorization);
            }
            let answer = request.call().map_err(|error| self.unreachable(&error))?;
            let to = text(answer.headers(), "location").unwrap_or_default();
            // A redirect to another host is the URL of the file, and this response describes the
            // file. A redirect to a path means that the repository was renamed, and the response at
            // that path describes the file.
            if answer.status().is_redirection() && to.starts_with('/') && !to.starts_with("//") {
                address = format!("{}{to}", self.root());
                continue;
            }
            if self.is_absent(&answer, file, revision)? {
                return Ok(None);
            }
            return read(answer.headers(), file).map(Some);
        }
        Err(HubError::Answer { file: file.to_owned(), header: "location: it redirects too often" })
    }

    /// Downloads the rest of a file. Reconnects until `STALLED_CONNECTIONS_MAX` connections in a
    /// row have delivered no new byte.
    pub fn download(&self, file: &str, commit: &str, found: &RemoteFile, blob: &Blob) -> Result<(), HubError> {
        let (_, mut here) = blob.continued()?;
        if here > found.bytes {
            blob.discard()?;
            here = 0;
        }
        self.watch.fetched(file, Bytes(here), Bytes(found.bytes));
        // The largest size that the partial file has reached. If the hub cannot resume a download,
        // the download starts over, and only bytes beyond this size count as progress.
        let (mut most, mut stalled) = (here, 0);
        while here < found.bytes {
            match self.continue_once(file, commit, found, blob) {
                // Losing the network during a download is treated like a connection that ends.
                Err(HubError::Unreachable { .. }) if most > 0 => {}
                outcome => outcome?,
            }
            here = blob.continued()?.1;
            stalled = if here > most { 0 } else { stalled + 1 };
            most = most.max(here);
            if stalled == STALLED_CONNECTIONS_MAX {
                return Err(HubError::Interrupted { file: file.to_owned(), bytes: here, bytes_total: found.bytes });
            }
        }
        self.watch.fetched(file, Bytes(here), Bytes(found.bytes));
        Ok(())
    }

    /// Downloads over one connection. A connection that ends early is not an error.
    fn continue_once(&self, file: &str, commit: &str, found: &RemoteFile, blob: &Blob) -> Result<(), HubError> {
        self.check_cancelled()?;
        let (mut part, mut here) = blob.continued()?;
        let mut request = self.agent.get(self.address(file, commit));
        if let Some(authorization) = &self.authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        if here > 0 {
            request = request.header(header::RANGE, format!("bytes={here}-"));
        }
        let answer = request.call().map_err(|error| self.unreachable(&error))?;
        let is_continued = answer.status().as_u16() == 206
            && text(answer.headers(), "content-range")
                .is_some_and(|range| range.starts_with(&format!("bytes {here}-")));
        match answer.status().as_u16() {
            // The hub starts over, or cannot continue from this offset.
            200 | 206 | 416 if here > 0 && !is_continued => return blob.discard(),
            200 | 206 => {}
            status => return Err(HubError::Status { file: file.to_owned(), status }),
        }
        let mut body = answer.into_body().into_reader();
        let (mut piece, mut reported) = (vec![0; PIECE_BYTES], here);
        loop {
            self.check_cancelled()?;
            let Ok(read @ 1..) = body.read(&mut piece) else { return Ok(()) };
            if here + read as u64 > found.bytes {
                blob.discard()?;
                let bytes = here + read as u64;
                return Err(HubError::Size { file: file.to_owned(), bytes, bytes_total: found.bytes });
            }
            part.write_all(&piece[..read]).map_err(failed(file))?;
            here += read as u64;
            if here - reported >= REPORT_BYTES {
                self.watch.fetched(file, Bytes(here), Bytes(found.bytes));
                reported = here;
            }
        }
    }

    fn address(&self, file: &str, revision: &str) -> String {
        format!("{}/{}/resolve/{}/{file}", self.endpoint, self.id, revision.replace('/', "%2F"))
    }

    /// The endpoint without a path.
    fn root(&self) -> String {
        let uri: Option<Uri> = self.endpoint.parse().ok();
        let parts = uri.as_ref().and_then(|uri| Some((uri.scheme_str()?, uri.authority()?)));
        parts.map_or_else(|| self.endpoint.to_owned(), |(scheme, host)| format!("{scheme}://{host}"))
    }

    /// Returns `true` if the repository and the revision exist, and only the file is missing. The
    /// hub reports this in `x-error-code`. For a mirror without this header, the status decides.
    fn is_absent(&self, answer: &Response<Body>, file: &str, revision: &str) -> Result<bool, HubError> {
        let repository = || format!("{}@{revision}", self.id);
        match (answer.status().as_u16(), text(answer.headers(), "x-error-code")) {
            (200..=399, _) => Ok(false),
            (404, Some("RepoNotFound" | "RevisionNotFound")) => {
                Err(HubError::NoRepository { repository: repository() })
            }
            (404, _) => Ok(true),
            (status @ (401 | 403), _) => Err(HubError::Refused { repository: repository(), status }),
            (status, _) => Err(HubError::Status { file: file.to_owned(), status }),
        }
    }

    /// Whether the watch has cancelled the fetch.
    pub fn is_cancelled(&self) -> bool {
        self.watch.is_cancelled()
    }

    fn check_cancelled(&self) -> Result<(), HubError> {
        if self.is_cancelled() { Err(HubError::Cancelled) } else { Ok(()) }
    }

    fn unreachable(&self, error: &ureq::Error) -> HubError {
        HubError::Unreachable { endpoint: self.endpoint.to_owned(), reason: error.to_string() }
    }
}

fn text<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name)?.to_str().ok()
}

/// Reads commit, etag and size. The `x-linked-..` headers describe a file on another server and
/// take precedence over the response's own headers.
fn read(headers: &HeaderMap, file: &str) -> Result<RemoteFile, HubError> {
    let lacks = |header| HubError::Answer { file: file.to_owned(), header };
    let commit = text(headers, "x-repo-commit").filter(|commit| {
        // The commit becomes the name of a folder.
        commit.len() == 40 && commit.bytes().all(|byte| byte.is_ascii_hexdigit())
    });
    let etag = text(headers, "x-linked-etag").or_else(|| text(headers, "etag"));
    let etag = etag.map(|etag| etag.trim_start_matches("W/").trim_matches('"')).filter(|etag| {
        // The etag becomes the name of a file.
        (1..=128).contains(&etag.len()) && etag.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    });
    let size = text(headers, "x-linked-size").or_else(|| text(headers, "content-length"));
    Ok(RemoteFile {
        commit: commit.ok_or_else(|| lacks("x-repo-commit"))?.to_owned(),
        etag: etag.ok_or_else(|| lacks("etag"))?.to_owned(),
        bytes: size.and_then(|size| size.parse().ok()).ok_or_else(|| lacks("x-linked-size"))?,
    })
}
