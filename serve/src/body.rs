//! Request bodies: limits on size, time and concurrency, decompression, and JSON errors that name
//! the wrong field.

use std::{
    io::Read,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use axum::{
    body::{self, BodyDataStream},
    extract::{FromRequest, Request},
    http::{
        HeaderMap, StatusCode,
        header::{CONTENT_ENCODING, CONTENT_LENGTH},
    },
};
use bursar::{Bytes, KIB};
use futures_util::StreamExt;
use serde::{
    Deserializer,
    de::{DeserializeOwned, Error, Visitor},
    forward_to_deserialize_any,
};
use serde_json::{Map, Value};
use tokio::{
    runtime::{Handle, RuntimeFlavor},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep_until, timeout},
};

use super::{error::ApiError, half_closed::InputEnd, lenient::Lenient, options::ServeOptions};

/// Upper bound on the memory of one parsed JSON value, in bytes. An empty message needs the most.
const VALUE_BYTES: u64 = 256;

/// JSON up to this many bytes is parsed on the async thread, which takes about 0.25 ms.
pub(super) const LARGE: usize = 256 << 10;

/// Limits shared by all request bodies.
pub(super) struct Bodies {
    body_bytes: Bytes,
    body_time: Duration,
    /// Memory for bodies, in KiB.
    permits: Arc<Semaphore>,
    /// Permits to parse or decompress a large body, one per CPU.
    parse_permits: Semaphore,
    /// `true` while a task that will return freed memory to the system is scheduled.
    is_trim_scheduled: Arc<AtomicBool>,
}

/// Delay between a large body and the call that returns freed memory to the system, so that a
/// single call covers several bodies.
const TRIM_DELAY: Duration = Duration::from_secs(1);

impl Bodies {
    pub(super) fn new(options: &ServeOptions) -> Self {
        let permits = usize::try_from(options.bodies_bytes.0 / KIB).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Bodies {
            body_bytes: options.body_bytes,
            body_time: options.body_time,
            permits: Arc::new(Semaphore::new(permits)),
            parse_permits: Semaphore::new(threads),
            is_trim_scheduled: Arc::default(),
        }
    }

    /// Schedules the return of freed memory to the system after a large body. Otherwise, the
    /// allocator would keep the memory.
    pub(super) fn schedule_trim(&self) {
        if self.is_trim_scheduled.swap(true, Relaxed) {
            return;
        }
        let is_trim_scheduled = self.is_trim_scheduled.clone();
        tokio::spawn(async move {
            sleep_until(Instant::now() + TRIM_DELAY).await;
            is_trim_scheduled.store(false, Relaxed);
            drop(tokio::task::spawn_blocking(bursar_budgets::give_back_freed_memory).await);
        });
    }

    /// Reserves memory for bytes that the server reads for a request, such as files and URLs.
    pub(super) fn reserve(&self, bytes: u64) -> Result<OwnedSemaphorePermit, ApiError> {
        self.take(kib(bytes))
    }

    fn take(&self, kib: u32) -> Result<OwnedSemaphorePermit, ApiError> {
        self.permits.clone().try_acquire_many_owned(kib).map_err(|_| {
            ApiError::busy("the server has reached its limit of request bytes in memory").hint("try again in a moment")
        })
    }
}

/// Memory that is reserved for a request: for its body, and for data that the server reads for it.
/// `None` if nothing is reserved.
pub(super) type BodyPermit = Option<OwnedSemaphorePermit>;

/// A parsed JSON body. Its memory stays reserved until `permit` is dropped.
pub(super) struct JsonBody<T> {
    pub(super) value: T,
    pub(super) permit: OwnedSemaphorePermit,
}

/// A type that can be parsed from a JSON body.
pub(super) trait FromJson: Sized {
    /// Parses the value. The error names the wrong field.
    fn from_json(bytes: &[u8]) -> Result<Self, ApiError>;
}

impl<T: FromJson, S: AsRef<Bodies> + Send + Sync> FromRequest<Arc<S>> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &Arc<S>) -> Result<Self, ApiError> {
        let bodies: &Bodies = S::as_ref(state);
        let (bytes, permit) = read(request, bodies).await?;
        if bytes.len() <= LARGE {
            return Ok(JsonBody { value: T::from_json(&bytes)?, permit });
        }
        // Parsing a large body would delay other requests on this thread. While a body is parsed,
        // its text and its values are both in memory, so at most one body per CPU is parsed at a
        // time.
        let _permit = bodies.parse_permits.acquire().await.expect("the semaphore is never closed");
        let value = aside(|| T::from_json(&bytes));
        drop(bytes);
        Ok(JsonBody { value: value?, permit })
    }
}

/// Runs long work without blocking other tasks on this thread.
pub(super) fn aside<T>(work: impl FnOnce() -> T) -> T {
    match Handle::current().runtime_flavor() {
        RuntimeFlavor::MultiThread => tokio::task::block_in_place(work),
        // A single-threaded runtime has no other thread that could run the tasks.
        _ => work(),
    }
}

/// Value of the `Content-Length` header.
pub(super) fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

async fn read(request: Request, bodies: &Bodies) -> Result<(Vec<u8>, OwnedSemaphorePermit), ApiError> {
    let limit = bodies.body_bytes;
    let coding = Coding::of(request.headers())?;
    let stated = content_length(request.headers());
    if stated.is_some_and(|stated| stated > limit.0) {
        return Err(too_large(limit));
    }
    // Nothing is reserved for `Content-Length`: a client can claim any length and send nothing.
    let mut permit = bodies.take(0)?;
    let input_end = request.extensions().get::<InputEnd>().cloned();
    let pieces = Pieces { stream: request.into_body().into_data_stream(), input_end };
    let collected = collect(pieces, stated.unwrap_or_default(), limit, bodies, &mut permit);
    let late = |_| {
        let message = format!("the body did not arrive within {} s", bodies.body_time.as_secs());
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message)
    };
    let mut bytes = timeout(bodies.body_time, collected).await.map_err(late)??;
    if coding != Coding::Plain {
        // A small compressed body may become a large one. Memory is reserved as it grows, and at
        // most one body per CPU is decompressed at a time.
        let _permit = bodies.parse_permits.acquire().await.expect("the semaphore is never closed");
        bytes = aside(|| coding.inflated(&bytes, limit, |bytes| grow(&mut permit, bytes, bodies)))?;
    }
    // Many small values take more memory than their text.
    grow(&mut permit, values(&bytes) * VALUE_BYTES, bodies)?;
    Ok((bytes, permit))
}

/// A body that ends early if the client closes the connection or its sending side.
struct Pieces {
    stream: BodyDataStream,
    /// `None` if the request did not come through a connection of this server.
    input_end: Option<InputEnd>,
}

impl Pieces {
    /// Waits for the next piece. Returns `None` at the end of the body.
    async fn next(&mut self) -> Result<Option<body::Bytes>, ApiError> {
        let early = || ApiError::invalid("body", "the body ended early");
        let Some(input_end) = &mut self.input_end else {
            return self.stream.next().await.transpose().map_err(|_| early());
        };
        tokio::select! {
            // hyper passes all pieces on before it reads the end of the input. Both happen in the
            // task of the connection, which also polls this future, so no piece can arrive between
            // the two branches.
            biased;
            piece = self.stream.next() => piece.transpose().map_err(|_| early()),
            () = input_end.hidden() => Err(early()),
        }
    }
}

/// Collects the body. Memory is reserved as it grows, because its length may be unknown.
async fn collect(
    mut pieces: Pieces,
    stated_bytes: u64,
    limit: Bytes,
    bodies: &Bodies,
    permit: &mut OwnedSemaphorePermit,
) -> Result<Vec<u8>, ApiError> {
    let mut bytes = Vec::new();
    while let Some(piece) = pieces.next().await? {
        if (bytes.len() + piece.len()) as u64 > limit.0 {
            return Err(too_large(limit));
        }
        if bytes.capacity() - bytes.len() < piece.len() {
            // Double the buffer, but not beyond `Content-Length`: most bodies then
            // leave no unused capacity.
            let lacks = (stated_bytes as usize).saturating_sub(bytes.len());
            bytes.reserve_exact(piece.len().max(bytes.len().max(LARGE).min(lacks)));
        }
        bytes.extend_from_slice(&piece);
        grow(permit, bytes.len() as u64, bodies)?;
    }
    Ok(bytes)
}

/// The `Content-Encoding` of a request body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Coding {
    Plain,
    Gzip,
    Deflate,
}

impl Coding {
    fn of(headers: &HeaderMap) -> Result<Self, ApiError> {
        let Some(coding) = headers.get(CONTENT_ENCODING) else { return Ok(Coding::Plain) };
        match coding.to_str().unwrap_or_default().trim().to_ascii_lowercase().as_str() {
            "" | "identity" => Ok(Coding::Plain),
            "gzip" | "x-gzip" => Ok(Coding::Gzip),
            "deflate" => Ok(Coding::Deflate),
            _ => {
                let message = "the Content-Encoding of the request is not supported";
                let error = ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", message);
                Err(error.hint("use gzip or deflate, or send the body uncompressed"))
            }
        }
    }

    /// Decompresses the body, up to `limit`. Calls `grown` with the size so far after each piece.
    fn inflated(
        self,
        bytes: &[u8],
        limit: Bytes,
        mut grown: impl FnMut(u64) -> Result<(), ApiError>,
    ) -> Result<Vec<u8>, ApiError> {
        let mut reader: Box<dyn Read + '_> = match self {
            Coding::Plain => Box::new(bytes),
            Coding::Gzip => Box::new(flate2::read::MultiGzDecoder::new(bytes)),
            Coding::Deflate => Box::new(flate2::read::ZlibDecoder::new(bytes)),
        };
        let mut inflated = Vec::new();
        loop {
            let piece = reader.by_ref().take(LARGE as u64).read_to_end(&mut inflated);
            if piece.map_err(|_| ApiError::invalid("body", "the body cannot be decompressed"))? == 0 {
                return Ok(inflated);
            }
            if inflated.len() as u64 > limit.0 {
                return Err(too_large(limit));
            }
            grown(inflated.len() as u64)?;
        }
    }
}

/// Extends the reservation to at least `bytes`.
fn grow(permit: &mut OwnedSemaphorePermit, bytes: u64, bodies: &Bodies) -> Result<(), ApiError> {
    let held = u32::try_from(permit.num_permits()).unwrap_or(u32::MAX);
    let lacks = kib(bytes).saturating_sub(held);
    if lacks > 0 {
        permit.merge(bodies.take(lacks)?);
    }
    Ok(())
}

/// Estimates the number of values in a JSON text: its commas and opening brackets, including commas
/// and brackets within strings.
fn values(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|byte| matches!(byte, b',' | b'[' | b'{')).count() as u64
}

fn kib(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(KIB)).unwrap_or(u32::MAX)
}

fn too_large(limit: Bytes) -> ApiError {
    let message = format!("the request is too large; the limit is {limit}");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
        .code("request_too_large")
        .hint("send smaller or fewer pictures")
}

/// Parses JSON with the tolerance of [`Lenient`]. The error names the wrong field.
pub(super) fn parsed<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    json(bytes).and_then(of)
}

/// Parses an object into two types. Members that are fields of the second type are parsed into the
/// second type, and all other members into the first type. Serde's `flatten` would lose the path of
/// a wrong field.
pub(super) fn pair_of<T: DeserializeOwned, U: DeserializeOwned>(whole: Value) -> Result<(T, U), ApiError> {
    let (second, first) = match whole {
        Value::Object(members) => {
            let known = field_names::<U>();
            debug_assert!(!known.is_empty(), "the second type must be a struct without `flatten`");
            let (second, first): (Map<_, _>, Map<_, _>) =
                members.into_iter().partition(|(name, _)| known.contains(&name.as_str()));
            (second, Value::Object(first))
        }
        // The value is not an object. Parsing it as the first type reports the error.
        other => (Map::new(), other),
    };
    Ok((of(first)?, of(Value::Object(second))?))
}

/// Returns the names of a struct's fields, which serde's derive passes to a deserializer.
fn field_names<T: DeserializeOwned>() -> &'static [&'static str] {
    struct Probe<'n>(&'n mut &'static [&'static str]);

    impl<'de> Deserializer<'de> for Probe<'_> {
        type Error = serde::de::value::Error;

        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            visitor: V,
        ) -> Result<V::Value, Self::Error> {
            *self.0 = fields;
            self.deserialize_any(visitor)
        }

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
            Err(Error::custom("there is no value"))
        }

        forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
            newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }

    let mut names: &[&str] = &[];
    drop(T::deserialize(Probe(&mut names)));
    names
}

/// Parses JSON as Python does: the last of duplicate keys wins, and a leading
/// byte-order mark is ignored.
pub(super) fn json(bytes: &[u8]) -> Result<Value, ApiError> {
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    serde_json::from_slice(bytes).map_err(|fault| ApiError::invalid("body", format!("the body is not JSON: {fault}")))
}

pub(super) fn of<T: DeserializeOwned>(json: Value) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(Lenient(json)).map_err(|error| {
        let message = error.inner().to_string();
        let path = with_missing(error.path().to_string(), &message);
        ApiError::invalid(path.clone(), format!("`{path}`: {message}"))
    })
}

/// Appends the name of a missing field to the path. Serde names it only in the message.
fn with_missing(path: String, message: &str) -> String {
    let missing = message.strip_prefix("missing field `").and_then(|rest| rest.split_once('`'));
    match (missing, path.as_str()) {
        (Some((field, _)), ".") => field.to_owned(),
        (Some((field, _)), _) => format!("{path}.{field}"),
        (None, _) => path,
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;
    use crate::error::Shape;

    #[derive(Debug, Deserialize, PartialEq)]
    struct Asked {
        turns: Vec<Turn>,
    }

    #[derive(Debug, Deserialize, PartialEq)]
    struct Turn {
        text: String,
    }

    fn error(body: &str) -> Value {
        let error = parsed::<Asked>(body.as_bytes()).expect_err("the body is wrong");
        assert_eq!(error.status, 400);
        error.body(Shape::OpenAi)["error"].clone()
    }

    #[test]
    fn a_wrong_field_is_named_by_its_path() {
        let refused = error(r#"{"turns": [{"text": "a"}, {"text": 5}]}"#);
        assert_eq!(refused["param"], "turns[1].text");
        let right = parsed(r#"{"turns": [{"text": "a", "other": 5}]}"#.as_bytes()).map_err(|error| error.status);
        assert_eq!(right, Ok(Asked { turns: vec![Turn { text: "a".to_owned() }] }));
        assert!(refused["message"].as_str().expect("text").contains("expected a string"), "{refused}");
        assert!(!refused["message"].as_str().expect("text").contains("line"), "{refused}");
    }

    #[test]
    fn duplicate_fields_and_a_byte_order_mark_are_accepted() {
        let read = |body: &str| parsed::<Asked>(body.as_bytes()).map_err(|error| error.status);
        let right = Ok(Asked { turns: vec![Turn { text: "b".to_owned() }] });
        assert_eq!(read(r#"{"turns": [{"text": "a"}], "turns": [{"text": "a", "text": "b"}]}"#), right);
        assert_eq!(read("\u{feff}{\"turns\": [{\"text\": \"b\"}]}"), right);
    }

    #[test]
    fn a_body_is_split_into_two_types_by_field_name() {
        #[derive(Debug, Deserialize, PartialEq)]
        struct Settings {
            n: Option<u32>,
            stop: Option<Vec<String>>,
        }
        assert_eq!(field_names::<Settings>(), ["n", "stop"]);
        assert_eq!(field_names::<Value>(), [""; 0]);
        let pair = |body: Value| {
            pair_of::<Asked, Settings>(body).map_err(|error| error.body(Shape::OpenAi)["error"]["param"].clone())
        };
        let turns = || vec![Turn { text: "b".to_owned() }];
        let right = pair(json!({"n": 1, "turns": [{"text": "b"}], "other": 5}));
        assert_eq!(right, Ok((Asked { turns: turns() }, Settings { n: Some(1), stop: None })));
        for (body, param) in [
            (json!({"turns": [{"text": "b"}], "stop": ["a", 1]}), "stop[1]"),
            (json!({"turns": [{"text": 1}], "stop": ["a", 1]}), "turns[0].text"),
            (json!({"n": 1}), "turns"),
            (json!("b"), "."),
        ] {
            assert_eq!(pair(body.clone()), Err(json!(param)), "{body}");
        }
    }

    #[test]
    fn invalid_json_is_an_error_of_the_body() {
        for body in ["", "{", r#"{"turns": []} x"#, "\u{0}", r#"{"turns": ["#] {
            assert_eq!(error(body)["param"], "body", "{body:?}");
        }
    }
}
