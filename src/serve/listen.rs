//! Listening: connections, their limits and times, TLS, and an end that loses nothing.

use std::{
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use rustls_pki_types::{
    CertificateDer, PrivateKeyDer,
    pem::{self, PemObject},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::{Notify, watch},
    task::JoinSet,
    time::{Instant, sleep_until, timeout},
};
use tokio_rustls::{TlsAcceptor, rustls};

use super::{
    connection_slots::{ConnectionSlot, ConnectionSlots, Kind},
    half_closed::{HalfClosed, Socket},
    options::ServeOptions,
    patience::Patient,
    root_path::below,
    service::{Service, only_probes},
};
use crate::Hint;

/// Files of TLS, in PEM.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The server's certificate, and those between it and a root that clients know.
    pub certificates: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// Why a server does not listen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// The system refuses the address.
    #[error("cannot listen on {address}: {source}")]
    Refused {
        /// The address asked for.
        address: String,
        /// The system's error.
        source: io::Error,
    },
    /// A file of TLS cannot be used.
    #[error("{}: {reason}", .file.display())]
    Tls {
        /// The file.
        file: PathBuf,
        /// Why not.
        reason: String,
    },
}

impl Hint for ListenError {
    type Text = String;

    fn hint(&self) -> String {
        let hint = match self {
            ListenError::Refused { source, .. } => match source.kind() {
                io::ErrorKind::AddrInUse => "stop the process that listens there, or use another port",
                io::ErrorKind::PermissionDenied => "use a port of 1024 or above",
                _ => "use an address of this machine and a port, such as 127.0.0.1:8000",
            },
            ListenError::Tls { .. } => {
                "name PEM files: the certificates of the server, and the private key of the first one"
            }
        };
        hint.to_owned()
    }
}

/// How long replies that are cut off have to tell their clients.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// The head time of connections in the reserve, so that idle ones do not fill it.
const RESERVE_HEAD_TIME: Duration = Duration::from_secs(2);
/// How often errors about connections are logged.
const LOGGED_EVERY: Duration = Duration::from_secs(10);

/// A [`Service`] that listens. Dropping it ends it at once; [`shutdown`](Server::shutdown) lets running replies end.
#[derive(Debug)]
#[must_use = "the server ends when this is dropped"]
pub struct Server {
    address: SocketAddr,
    has_tls: bool,
    service: Service,
    stop: watch::Sender<bool>,
    serving: tokio::task::JoinHandle<()>,
}

impl Server {
    /// Listens on an address, such as `127.0.0.1:8000`; port 0 takes any free one.
    ///
    /// # Errors
    /// [`ListenError`].
    pub async fn start(service: Service, address: &str, tls: Option<&TlsFiles>) -> Result<Self, ListenError> {
        let refused = |source| ListenError::Refused { address: address.to_owned(), source };
        let acceptor = tls.map(acceptor).transpose()?;
        let listener = TcpListener::bind(address).await.map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        let (stop, stopped) = watch::channel(false);
        let router = below(&service.options().root_path, service.whole(address.ip().is_loopback()));
        let probes = router.clone().layer(axum::middleware::from_fn_with_state(service.clone(), only_probes));
        let places = ConnectionSlots::new(service.options());
        let serving = Accepting { listener, acceptor, service: service.clone(), router, probes, places, stopped };
        let has_tls = serving.acceptor.is_some();
        Ok(Server { address, has_tls, service, stop, serving: tokio::spawn(serving.run()) })
    }

    /// The address it listens on.
    pub fn addr(&self) -> SocketAddr {
        self.address
    }

    /// `http` or `https`.
    pub fn scheme(&self) -> &'static str {
        if self.has_tls { "https" } else { "http" }
    }

    /// Refuses new requests, and returns when the running ones have ended, or after
    /// [`drain`](super::ServeOptions::drain). Then replies that are left end with an error. Health and metrics are
    /// answered until the end.
    pub async fn shutdown(mut self) {
        self.service.end();
        self.stop.send_replace(true);
        if timeout(self.service.options().drain, &mut self.serving).await.is_err() {
            self.service.cut();
            drop(timeout(LAST_WORDS, &mut self.serving).await);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

fn acceptor(files: &TlsFiles) -> Result<TlsAcceptor, ListenError> {
    let wrong = |file: &Path, reason: String| ListenError::Tls { file: file.to_owned(), reason };
    let certificates = CertificateDer::pem_file_iter(&files.certificates)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| wrong(&files.certificates, error.to_string()))?;
    if certificates.is_empty() {
        return Err(wrong(&files.certificates, "the file contains no certificate".to_owned()));
    }
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|error| match error {
        pem::Error::NoItemsFound => wrong(&files.key, "the file contains no private key".to_owned()),
        error => wrong(&files.key, error.to_string()),
    })?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| wrong(&files.certificates, error.to_string()))?
        .with_no_client_auth()
        .with_single_cert(certificates, key)
        .map_err(|error| match error {
            rustls::Error::InconsistentKeys(_) => wrong(
                &files.key,
                format!("the key does not belong to the first certificate in {}", files.certificates.display()),
            ),
            error => wrong(&files.certificates, error.to_string()),
        })?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

struct Accepting {
    listener: TcpListener,
    acceptor: Option<TlsAcceptor>,
    service: Service,
    /// Made once: connections share it.
    router: Router,
    /// The same for connections in the reserve.
    probes: Router,
    places: ConnectionSlots,
    stopped: watch::Receiver<bool>,
}

impl Accepting {
    async fn run(mut self) {
        let (mut running, mut errors) = (JoinSet::new(), Errors::default());
        loop {
            let (stream, address) = tokio::select! {
                _ = self.stopped.wait_for(|stopped| *stopped) => break,
                accepted = accept(&self.listener, &mut errors) => accepted,
                // Ended ones are forgotten as they end.
                Some(_) = running.join_next() => continue,
            };
            match self.places.take(address.ip(), Kind::Usual) {
                Some(place) => drop(running.spawn(self.connection(stream, place))),
                None => errors.tell(
                    "a connection was closed: too many are open; raise --connections or --connections-per-address",
                ),
            }
        }
        // Load balancers still ask whether this server takes requests.
        let mut late = JoinSet::new();
        loop {
            tokio::select! {
                biased;
                ended = running.join_next() => if ended.is_none() { break },
                (stream, address) = accept(&self.listener, &mut errors) => {
                    if let Some(place) = self.places.take(address.ip(), Kind::Reserve) {
                        late.spawn(self.connection(stream, place));
                    }
                }
                Some(_) = late.join_next() => {}
            }
        }
    }

    fn connection(&self, stream: TcpStream, place: ConnectionSlot) -> impl Future<Output = ()> + Send + use<> {
        let (service, stopped, acceptor) = (self.service.clone(), self.stopped.clone(), self.acceptor.clone());
        let router = match place.kind {
            Kind::Usual => self.router.clone(),
            Kind::Reserve => self.probes.clone(),
        };
        async move {
            let limits = Limits::of(service.options(), place.kind);
            // Small chunks of a stream must not wait for each other.
            drop(stream.set_nodelay(true));
            match acceptor {
                None => serve(stream, limits, router, stopped).await,
                // A client that does not finish its greeting has as long as for a head.
                Some(acceptor) => {
                    if let Ok(Ok(stream)) = timeout(limits.head_time, acceptor.accept(stream)).await {
                        serve(stream, limits, router, stopped).await;
                    }
                }
            }
            drop(place);
        }
    }
}

/// What one connection may take.
#[derive(Clone, Copy)]
struct Limits {
    head_time: Duration,
    head_bytes: usize,
    body_time: Duration,
    keeps_alive: bool,
}

impl Limits {
    fn of(options: &ServeOptions, kind: Kind) -> Self {
        let ServeOptions { head_time, head_bytes, body_time, .. } = *options;
        let is_usual = kind == Kind::Usual;
        Limits {
            head_time: if is_usual { head_time } else { head_time.min(RESERVE_HEAD_TIME) },
            head_bytes: head_bytes.as_usize().max(8192),
            body_time: if is_usual { body_time } else { body_time.min(RESERVE_HEAD_TIME) },
            keeps_alive: is_usual,
        }
    }
}

/// Errors about connections, which may come by thousands.
#[derive(Default)]
struct Errors {
    told: Option<Instant>,
    untold: usize,
}

impl Errors {
    fn tell(&mut self, error: &str) {
        if self.told.is_some_and(|told| told.elapsed() < LOGGED_EVERY) {
            self.untold += 1;
            return;
        }
        self.told = Some(Instant::now());
        tracing::warn!(error, others = std::mem::take(&mut self.untold), "a connection could not be served");
    }
}

/// The next connection.
async fn accept(listener: &TcpListener, errors: &mut Errors) -> (TcpStream, SocketAddr) {
    /// The system may have no descriptors left; connections that end give some back.
    const PAUSE: Duration = Duration::from_millis(50);
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
            Err(error) => {
                errors.tell(&error.to_string());
                sleep_until(Instant::now() + PAUSE).await;
            }
        }
    }
}

/// Serves one connection until it ends, or until its running request has ended when the server stops.
async fn serve(
    stream: impl AsyncRead + AsyncWrite + Socket + Unpin + Send + 'static,
    limits: Limits,
    router: Router,
    mut stopped: watch::Receiver<bool>,
) {
    let half_closed = Arc::new(Notify::new());
    let io = TokioIo::new(HalfClosed::new(Patient::new(stream, limits.body_time), half_closed.clone()));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_time)
        .max_buf_size(limits.head_bytes)
        .keep_alive(limits.keeps_alive)
        .serve_connection(io, TowerToHyperService::new(router));
    let mut connection = std::pin::pin!(connection);
    // What is in the reserve ends by itself.
    if limits.keeps_alive {
        tokio::select! {
            ended = connection.as_mut() => return note(ended),
            _ = stopped.wait_for(|stopped| *stopped) => {}
            () = half_closed.notified() => {}
        }
        connection.as_mut().graceful_shutdown();
    }
    note(connection.await);
}

fn note(ended: Result<(), hyper::Error>) {
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection broke");
    }
}
