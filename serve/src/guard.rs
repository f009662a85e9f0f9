//! Authentication: API keys, administrators, and the limit of concurrent replies per key.

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use axum::http::{HeaderMap, StatusCode, header::AUTHORIZATION};
use subtle::ConstantTimeEq;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{
    access::Used, body::BodyPermit, error::ApiError, header_params::HeaderParams, openai::usage::UsageBody,
    options::ServeOptions,
};

/// API keys of a server. Without keys, every client is admitted.
pub(super) struct Guard {
    keys: Vec<Key>,
    /// Hashes of the administrators' keys.
    admin_hashes: Vec<[u8; 32]>,
    open_admin: bool,
    /// Limit of concurrent replies per key, or for all clients together if there are no keys.
    streams: Option<usize>,
    /// Permits of all clients together if there are no keys.
    all: OnceLock<Arc<Semaphore>>,
}

struct Key {
    /// BLAKE3 hash of the key. Hashes have equal lengths, so the time of a comparison does not
    /// reveal the length of the key.
    hash: [u8; 32],
    streams: Option<Arc<Semaphore>>,
}

/// Never prints a key.
impl fmt::Debug for Guard {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Guard({} keys)", self.keys.len())
    }
}

/// The client of a request, with its permits for concurrent replies.
#[derive(Clone, Default)]
pub(super) struct Client {
    permits: Option<Arc<Semaphore>>,
    key: Option<usize>,
    is_admin: bool,
    header_params: HeaderParams,
    used: Used,
}

/// Resources that a request holds while it is answered: permits for its replies, and reserved
/// memory. The reserved memory includes the memory of pictures that the model still holds.
#[derive(Default)]
pub(super) struct Held {
    _permits: Option<OwnedSemaphorePermit>,
    permit: BodyPermit,
    used: Used,
}

impl Held {
    /// Returns the reserved memory, which grows as data is read for the request.
    pub(super) fn permit(&mut self) -> &mut BodyPermit {
        &mut self.permit
    }

    /// Records the token usage, after all replies have ended.
    pub(super) fn used(&self, usage: UsageBody) {
        self.used.record(usage);
    }
}

impl Client {
    /// Adds the parameters in the request's headers, and the record for its token usage.
    pub(super) fn asking(self, header_params: HeaderParams, used: Used) -> Self {
        Client { header_params, used, ..self }
    }

    pub(super) fn header_params(&self) -> &HeaderParams {
        &self.header_params
    }

    pub(super) fn is_admin(&self) -> bool {
        self.is_admin
    }

    /// Index of the client's key. `None` for administrators, and if the server has no keys.
    pub(super) fn key(&self) -> Option<usize> {
        self.key
    }

    /// Acquires permits for `replies`. The permits are held with the memory of the request until
    /// the result is dropped.
    pub(super) fn hold(&self, replies: usize, permit: OwnedSemaphorePermit) -> Result<Held, ApiError> {
        let permits = self.permits(replies)?;
        Ok(Held { _permits: permits, permit: Some(permit), used: self.used.clone() })
    }

    fn permits(&self, replies: usize) -> Result<Option<OwnedSemaphorePermit>, ApiError> {
        let Some(permits) = &self.permits else { return Ok(None) };
        let full = |_| {
            ApiError::full("this key has reached its limit of concurrent replies")
                .code("streams_exhausted")
                .hint("try again when one of its replies has ended")
        };
        let replies = u32::try_from(replies).unwrap_or(u32::MAX);
        permits.clone().try_acquire_many_owned(replies).map(Some).map_err(full)
    }
}

impl Guard {
    pub(super) fn new(options: &ServeOptions) -> Self {
        let ServeOptions { keys, admin_keys, open_admin, streams_per_key: streams, .. } = options;
        let streams = *streams;
        let limit = || streams.map(|streams| Arc::new(Semaphore::new(streams.min(Semaphore::MAX_PERMITS))));
        let hash = |key: &String| *blake3::hash(key.as_bytes()).as_bytes();
        Guard {
            keys: keys.iter().map(|key| Key { hash: hash(key), streams: limit() }).collect(),
            admin_hashes: admin_keys.iter().map(hash).collect(),
            open_admin: *open_admin,
            streams,
            all: OnceLock::new(),
        }
    }

    /// Whether clients without an administrator key are administrators.
    fn is_anyone_admin(&self, is_local: bool) -> bool {
        let is_alone = is_local && self.keys.is_empty();
        self.admin_hashes.is_empty() && (self.open_admin || is_alone)
    }

    /// Whether there are several keys. With several keys, the load of the server would reveal to
    /// one client the load of other clients.
    pub(super) fn has_tenants(&self) -> bool {
        self.keys.len() > 1
    }

    /// Returns the error for a client that is not an administrator.
    pub(super) fn admin_only(&self) -> ApiError {
        let error =
            ApiError::new(StatusCode::FORBIDDEN, "permission_error", "this request needs the key of an administrator");
        error.code("admin_required").hint(if self.admin_hashes.is_empty() {
            "start the server with --admin-key-file and send one of its keys, or start it with --open-admin"
        } else {
            "send a key of the server's --admin-key-file"
        })
    }

    /// Whether every client is admitted, because there are no keys.
    pub(super) fn is_open(&self) -> bool {
        self.keys.is_empty()
    }

    /// Tenant of the client's key, if there are several keys. The first is `key-1`.
    pub(super) fn tenant_of(&self, client: &Client) -> Option<String> {
        client.key.filter(|_| self.has_tenants()).map(|index| format!("key-{}", index + 1))
    }

    /// Identifies a client by its headers: `Authorization: Bearer KEY` as OpenAI's clients send it,
    /// or `x-api-key: KEY` as Anthropic's do. `is_local` is set if only this machine can reach the
    /// server. Every client of such a server is an administrator if the server has neither keys nor
    /// administrator keys.
    pub(super) fn admit_at(&self, headers: &HeaderMap, is_local: bool) -> Result<Client, ApiError> {
        let hash = sent_key(headers).map(blake3::hash);
        // Compare every key, so that the time does not reveal which key matched.
        let is_admin = hash.is_some_and(|hash| {
            let keys = self.admin_hashes.iter();
            keys.fold(false, |found, key| found | bool::from(key[..].ct_eq(&hash.as_bytes()[..])))
        });
        let anyone = Client { is_admin: is_admin || self.is_anyone_admin(is_local), ..Client::default() };
        if self.keys.is_empty() {
            let limit = |streams: usize| Arc::new(Semaphore::new(streams.min(Semaphore::MAX_PERMITS)));
            let permits = self.streams.map(|streams| self.all.get_or_init(|| limit(streams)).clone());
            return Ok(Client { permits, ..anyone });
        }
        if is_admin {
            return Ok(anyone);
        }
        let hash = hash.ok_or_else(|| refused("this server requires an API key"))?;
        // Compare every key, so that the time does not reveal which key matched.
        let keys = self.keys.iter().enumerate();
        let found = keys.fold(None, |found, (index, key)| {
            if bool::from(key.hash.ct_eq(hash.as_bytes())) {
                Some(Client { permits: key.streams.clone(), key: Some(index), ..anyone.clone() })
            } else {
                found
            }
        });
        found.ok_or_else(|| refused("the API key is not valid for this server"))
    }
}

/// Marks a request that came through a listener that only this machine can reach.
#[derive(Clone, Copy)]
pub(super) struct Local;

fn sent_key(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(AUTHORIZATION).and_then(|sent| {
        let (scheme, key) = sent.as_bytes().split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then_some(key.trim_ascii())
    });
    bearer.or_else(|| headers.get("x-api-key").map(|key| key.as_bytes()))
}

fn refused(message: &str) -> ApiError {
    ApiError::new(StatusCode::UNAUTHORIZED, "authentication_error", message)
        .code("invalid_api_key")
        .hint("send it as `Authorization: Bearer KEY` or `x-api-key: KEY`")
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn guarding(keys: &[&str], streams: Option<usize>) -> Guard {
        let keys = keys.iter().map(|&key| key.to_owned()).collect();
        Guard::new(&ServeOptions { keys, streams_per_key: streams, ..ServeOptions::default() })
    }

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name.parse().expect("a name"), HeaderValue::from_str(value).expect("a value"))])
    }

    #[test]
    fn only_valid_keys_in_either_header_are_admitted() {
        let guard = guarding(&["one", "two"], None);
        for (name, value) in [("authorization", "Bearer one"), ("authorization", "bearer two"), ("x-api-key", "two")] {
            assert!(guard.admit_at(&headers(name, value), false).is_ok(), "{name}: {value}");
        }
        for (name, value) in [("authorization", "Bearer on"), ("authorization", "Basic one"), ("x-api-key", "")] {
            assert_eq!(
                guard.admit_at(&headers(name, value), false).map(drop).expect_err("the key is wrong").status,
                401,
                "{value}"
            );
        }
        assert_eq!(guard.admit_at(&HeaderMap::new(), false).map(drop).expect_err("the key is wrong").status, 401);
        assert_eq!(format!("{guard:?}"), "Guard(2 keys)");
    }

    #[test]
    fn concurrent_replies_are_limited_for_each_key() {
        let guard = guarding(&["one", "two"], Some(1));
        let [one, two] = ["one", "two"].map(|key| guard.admit_at(&headers("x-api-key", key), false).expect("a key"));
        let permit = one.permits(1).expect("the first permit");
        assert_eq!(one.permits(1).map(drop).expect_err("the key has no permit left").status, 429);
        assert!(two.permits(1).is_ok());
        drop(permit);
        assert!(one.permits(1).is_ok());
    }

    #[test]
    fn administrators_need_a_key_unless_the_server_is_local() {
        let of = |guard: &Guard, key: &str, is_local| {
            guard.admit_at(&headers("x-api-key", key), is_local).map(|client| client.is_admin())
        };
        let is_admin = |guard: &Guard, key: &str| of(guard, key, true);
        let (open, keyed) = (guarding(&[], None), guarding(&["one"], None));
        assert_eq!(of(&open, "x", false).ok(), Some(false), "a server that other machines can reach needs admin keys");
        assert_eq!(is_admin(&open, "x").ok(), Some(true));
        assert_eq!(is_admin(&keyed, "one").ok(), Some(false), "a client key is not an admin key");
        for keys in [vec![], vec!["one".to_owned()]] {
            let options = ServeOptions { keys, admin_keys: vec!["boss".to_owned()], ..ServeOptions::default() };
            let guard = Guard::new(&ServeOptions { open_admin: true, ..options });
            assert_eq!((is_admin(&guard, "boss").ok(), is_admin(&guard, "one").ok()), (Some(true), Some(false)));
        }
        let options = ServeOptions { keys: vec!["one".to_owned()], open_admin: true, ..ServeOptions::default() };
        assert_eq!(is_admin(&Guard::new(&options), "one").ok(), Some(true));
    }

    #[test]
    fn clients_without_keys_share_one_reply_limit() {
        let guard = guarding(&[], Some(1));
        let [one, two] = [(); 2]
            .map(|()| guard.admit_at(&HeaderMap::new(), false).expect("a server without keys admits every client"));
        let _permit = one.permits(1).expect("the first permit");
        assert!(two.permits(1).is_err());
        assert!(
            guarding(&[], None)
                .admit_at(&HeaderMap::new(), false)
                .expect("a server without keys admits every client")
                .permits(1)
                .is_ok()
        );
    }
}
