//! Downloads of pictures and videos from URLs: only from allowed hosts, by default not from private
//! addresses, and bounded in bytes, time and redirects.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
    time::{Duration, Instant},
};

use axum::http::{Uri, header::LOCATION};
use bursar::Bytes;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use tokio::{sync::Semaphore, time::timeout};
use ureq::{
    Agent, Error,
    config::Config,
    unversioned::{
        resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver},
        transport::{DefaultConnector, NextTimeout},
    },
};

use super::{error::ApiError, models::shortened, options::ServeOptions};

/// Maximum number of redirects. Each must lead to an allowed host.
const REDIRECTS_MAX: usize = 3;
/// Time limit of a download, from the request to the last byte, redirects included. A download that
/// waits for its turn waits at most this long before the request.
const TIME_MAX: Duration = Duration::from_secs(15);
/// Concurrent downloads from one allowed host, over all clients. Further downloads wait. The limit
/// is per host, so that a slow host does not delay downloads from other hosts.
const AT_ONCE: usize = 16;
/// Characters that are common in written URLs but invalid in a request. They are percent-encoded,
/// as are all non-ASCII characters.
const ENCODED: &AsciiSet = &CONTROLS.add(b' ').add(b'"').add(b'<').add(b'>').add(b'`');

/// Downloads for all requests of a server.
pub(super) struct Fetcher {
    agent: Agent,
    /// `host` or `host:port`, in lower case.
    hosts: Arc<[String]>,
    bytes_max: Bytes,
    /// One semaphore per host, in the order of `hosts`.
    permits: Vec<Arc<Semaphore>>,
}

impl Fetcher {
    pub(super) fn new(options: &ServeOptions) -> Self {
        // `follow` follows redirects itself and checks the host of each redirect. A proxy is not
        // used, because it would resolve names without the address check of `Addresses`.
        let config = Config::builder()
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .proxy(None)
            .user_agent(concat!("bursar/", env!("CARGO_PKG_VERSION")))
            .build();
        let resolver = Addresses { inner: DefaultResolver::default(), may_be_private: options.private_url_hosts };
        let hosts = options.url_hosts.iter().map(|host| host.to_ascii_lowercase()).collect();
        let agent = Agent::with_parts(config, DefaultConnector::default(), resolver);
        let permits = options.url_hosts.iter().map(|_| Arc::new(Semaphore::new(AT_ONCE))).collect();
        Fetcher { agent, hosts, bytes_max: options.body_bytes, permits }
    }

    /// Downloads the bytes at a URL.
    ///
    /// # Errors
    /// 400 if the URL is not allowed or the download fails; 503 if too many downloads from its host
    /// are still running after a wait of `TIME_MAX`.
    pub(super) async fn fetch(&self, url: &str, param: &str) -> Result<Vec<u8>, ApiError> {
        let wrong = |fault: Fault| {
            let message = format!("`{}` {}", shortened(url), fault.message);
            ApiError::invalid(param, message).hint(fault.hint)
        };
        let (_, host) = check(url, &self.hosts).map_err(wrong)?;
        let full = || {
            ApiError::busy("the server is already fetching its maximum number of pictures from this host")
                .hint("try again in a moment")
        };
        let permit = timeout(TIME_MAX, self.permits[host].clone().acquire_owned()).await.map_err(|_| full())?;
        let (agent, hosts, bytes_max, first) = (self.agent.clone(), self.hosts.clone(), self.bytes_max, url.to_owned());
        let fetched = tokio::task::spawn_blocking(move || {
            // Keep the permit until the download ends, even if the request ends earlier.
            let _permit = permit;
            follow(&agent, &hosts, bytes_max, first)
        });
        let fetched = fetched.await;
        fetched.map_err(|_| ApiError::unavailable("the thread that fetches pictures has died"))?.map_err(wrong)
    }
}

/// Why a URL cannot be fetched.
struct Fault {
    message: String,
    hint: &'static str,
}

fn fault(message: impl Into<String>, hint: &'static str) -> Fault {
    Fault { message: message.into(), hint }
}

fn follow(agent: &Agent, hosts: &[String], bytes_max: Bytes, first: String) -> Result<Vec<u8>, Fault> {
    let (mut url, until) = (first, Instant::now() + TIME_MAX);
    for _ in 0..=REDIRECTS_MAX {
        let (uri, _) = check(&url, hosts)?;
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let request = agent.get(&uri).config().timeout_global(Some(left)).build();
        let mut response = request.call().map_err(failed)?;
        if response.status().is_redirection() {
            let target = response.headers().get(LOCATION).and_then(|target| target.to_str().ok());
            url = target
                .and_then(|target| joined(&uri, target))
                .ok_or_else(|| fault("redirects without a target", "give the URL of the picture itself"))?;
            continue;
        }
        if !response.status().is_success() {
            return Err(fault(format!("answered {}", response.status().as_u16()), "check the URL"));
        }
        return response.body_mut().with_config().limit(bytes_max.0).read_to_vec().map_err(|error| match error {
            Error::BodyExceedsLimit(_) => {
                fault(format!("is too large; the limit is {bytes_max}"), "use a smaller picture")
            }
            error => failed(error),
        });
    }
    Err(fault(format!("redirects more than {REDIRECTS_MAX} times"), "give the URL of the picture itself"))
}

fn failed(error: Error) -> Fault {
    match error {
        Error::HostNotFound => fault("has no address that this server may reach", "use a public host"),
        Error::Timeout(_) => fault("did not respond in time", "send the picture as a data URI"),
        error => fault(format!("could not be fetched: {error}"), "check the URL, or send a data URI"),
    }
}

/// Parses the URL and checks its host. Returns the index of the host in `hosts`.
fn check(url: &str, hosts: &[String]) -> Result<(Uri, usize), Fault> {
    let no_url = || fault("is not a URL", "expected a URL such as https://example.org/picture.jpg");
    let uri: Uri = utf8_percent_encode(url, ENCODED).to_string().parse().map_err(|_| no_url())?;
    let authority = uri.authority().ok_or_else(no_url)?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) {
        return Err(fault("is neither http nor https", "send the picture as a data URI"));
    }
    if authority.as_str().contains('@') {
        return Err(fault("contains a user name or password", "remove them from the URL"));
    }
    let (host, whole) = (authority.host().to_ascii_lowercase(), authority.as_str().to_ascii_lowercase());
    // An allowed host without a port allows only the default port of the scheme.
    let is_it = |allowed: &String| *allowed == whole || *allowed == host && authority.port().is_none();
    match hosts.iter().position(is_it) {
        Some(at) => Ok((uri, at)),
        None => Err(fault("is not on a host that this server may fetch from", "send the picture as a data URI")),
    }
}

/// Target of a redirect: an absolute URL, or a path on the same host.
fn joined(from: &Uri, target: &str) -> Option<String> {
    if target.starts_with('/') && !target.starts_with("//") {
        Some(format!("{}://{}{target}", from.scheme_str()?, from.authority()?))
    } else {
        target.contains("://").then(|| target.to_owned())
    }
}

/// Resolver that drops private addresses, unless they are allowed. The resolver runs when a
/// connection is made, so the address that is checked is also the address that is connected to.
#[derive(Debug)]
struct Addresses {
    inner: DefaultResolver,
    may_be_private: bool,
}

impl Resolver for Addresses {
    fn resolve(
        &self,
        uri: &ureq::http::Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, Error> {
        let found = self.inner.resolve(uri, config, timeout)?;
        let mut allowed = self.empty();
        for address in found.iter().filter(|address| self.may_be_private || is_public(address.ip())) {
            allowed.push(*address);
        }
        if allowed.is_empty() { Err(Error::HostNotFound) } else { Ok(allowed) }
    }
}

/// Whether an address is on the public internet (IANA's registries of special-purpose addresses).
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let is_special = address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_broadcast()
        || address.is_documentation()
        || address.is_multicast()
        || a == 0
        || a >= 240
        // Carrier-grade NAT, protocol assignments, benchmarks.
        || (a == 100 && b & 0xC0 == 64)
        || (a, b, c) == (192, 0, 0)
        || (a == 198 && b & 0xFE == 18);
    !is_special
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    if let Some(mapped) = address.to_ipv4_mapped() {
        return is_public_v4(mapped);
    }
    let parts = address.segments();
    // Accept only global unicast addresses, except protocol assignments (2001::/23, which includes
    // Teredo), 6to4 addresses (2002), which embed an IPv4 address, and addresses for documentation
    // (2001:db8, 3fff).
    let is_global = parts[0] & 0xE000 == 0x2000;
    let is_special =
        (parts[0] == 0x2001 && (parts[1] < 0x200 || parts[1] == 0xDB8)) || parts[0] == 0x2002 || parts[0] == 0x3FFF;
    is_global && !is_special
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_addresses_are_recognized_in_every_notation() {
        for public in ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8"] {
            assert!(is_public(public.parse().expect("an address")), "{public}");
        }
        for private in [
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "255.255.255.255",
            "224.0.0.1",
            "198.18.0.1",
            "192.0.0.8",
            "::1",
            "::",
            "fe80::1",
            "fc00::1",
            "fd12::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "64:ff9b::7f00:1",
            "2002:7f00:1::",
            "2001:0:1::",
            "::127.0.0.1",
        ] {
            assert!(!is_public(private.parse().expect("an address")), "{private}");
        }
    }

    #[test]
    fn only_urls_with_an_allowed_host_and_port_pass() {
        let hosts = ["example.org".to_owned(), "pictures.example.org:8443".to_owned()];
        for url in ["http://example.org/a.png", "https://EXAMPLE.org/", "https://pictures.example.org:8443/a?b=c"] {
            assert!(check(url, &hosts).is_ok(), "{url}");
        }
        for url in [
            "https://example.org.evil.net/",
            "https://evil.net/example.org",
            "https://example.org:8080/",
            "https://pictures.example.org/",
            "https://example.org@evil.net/",
            "https://user:pw@example.org/",
            "ftp://example.org/",
            "file:///etc/passwd",
            "example.org/a",
            "//example.org/a",
            "http://[::1]/",
            "http://127.0.0.1/",
            "http://0x7f000001/",
            "",
            "http://",
            "https://example.org\\@evil.net/",
        ] {
            assert!(check(url, &hosts).is_err(), "{url}");
        }
    }

    #[test]
    fn redirects_must_be_absolute_urls_or_paths() {
        let from: Uri = "https://example.org:8443/a/b".parse().expect("a URL");
        assert_eq!(joined(&from, "/c").as_deref(), Some("https://example.org:8443/c"));
        assert_eq!(joined(&from, "http://evil.net/c").as_deref(), Some("http://evil.net/c"));
        assert_eq!(joined(&from, "//evil.net/c"), None);
        assert_eq!(joined(&from, "c"), None);
    }
}
