//! Listener: connections with their limits and timeouts, TLS, and graceful shutdown.

use std::{
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use axum::Router;
use bursar::Hint;
use hyper::{body::Incoming, server::conn::http1};
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
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep_until, timeout},
};
use tokio_rustls::{TlsAcceptor, rustls};
use tower::ServiceExt;

use super::{
    connection_slots::{ConnectionSlot, ConnectionSlots, Kind},
    half_closed::{HalfClosed, Socket},
    options::ServeOptions,
    root_path::below,
    routes::only_probes,
    state::Service,
    write_timeout::WriteTimeout,
};

/// Certificate and key files for TLS, in PEM format.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The server's certificate, followed by the intermediate certificates up to a
    /// root that clients trust.
    pub certificates: PathBuf,
    /// Private key of the server's certificate.
    pub key: PathBuf,
}

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// The operating system refused the address.
    #[error("cannot listen on {address}: {source}")]
    Refused {
        /// Address that was requested.
        address: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A TLS file cannot be used.
    #[error("{}: {reason}", .file.display())]
    Tls {
        /// The certificate or key file.
        file: PathBuf,
        /// Why the file cannot be used.
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

/// Time for aborted replies to send their error to clients.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Upper limit of `head_time` and `body_time` for connections in the reserve, so that idle
/// connections do not fill it.
const RESERVE_HEAD_TIME: Duration = Duration::from_secs(2);
/// Minimum time between log lines about connection errors.
const LOGGED_EVERY: Duration = Duration::from_secs(10);

/// A [`Service`] with a listener. Dropping the server closes all connections at once.
/// [`shutdown`](Server::shutdown) lets running replies finish.
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
    /// Listens on an address, such as `127.0.0.1:8000`. Port 0 selects any free port.
    ///
    /// # Errors
    /// [`ListenError`] if the address is refused or a TLS file cannot be used.
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

    /// Address that the server listens on.
    pub fn addr(&self) -> SocketAddr {
        self.address
    }

    /// URL scheme: `http` or `https`.
    pub fn scheme(&self) -> &'static str {
        if self.has_tls { "https" } else { "http" }
    }

    /// Refuses new requests, and waits until running requests have ended, but at most
    /// [`drain`](super::ServeOptions::drain). Replies that are still running then end with an
    /// error. Health and metrics requests are answered until the end.
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
    /// Built once and shared by all connections.
    router: Router,
    /// Router of connections in the reserve, which answers only health and metrics requests.
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
                // Remove connections from the set as they end.
                Some(_) = running.join_next() => continue,
            };
            match self.places.take(address.ip(), Kind::Usual) {
                Some(place) => drop(running.spawn(self.connection(stream, place))),
                None => errors.warn(
                    "a connection was closed: too many are open; raise --connections or --connections-per-address",
                ),
            }
        }
        // Load balancers still check readiness during the shutdown.
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
            // Disable Nagle's algorithm: small chunks of a stream must not wait for each other.
            drop(stream.set_nodelay(true));
            match acceptor {
                None => serve(stream, limits, router, stopped).await,
                // A TLS handshake has the same time limit as a request head.
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

/// Rate-limited log of connection errors, which may arrive by the thousand.
#[derive(Default)]
struct Errors {
    last_logged: Option<Instant>,
    untold: usize,
}

impl Errors {
    fn warn(&mut self, error: &str) {
        if self.last_logged.is_some_and(|last_logged| last_logged.elapsed() < LOGGED_EVERY) {
            self.untold += 1;
            return;
        }
        self.last_logged = Some(Instant::now());
        tracing::warn!(error, others = std::mem::take(&mut self.untold), "a connection could not be served");
    }
}

/// Waits for the next connection.
async fn accept(listener: &TcpListener, errors: &mut Errors) -> (TcpStream, SocketAddr) {
    /// Pause after an error: the process may have no file descriptors left until a connection ends.
    const PAUSE: Duration = Duration::from_millis(50);
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
            Err(error) => {
                errors.warn(&error.to_string());
                sleep_until(Instant::now() + PAUSE).await;
            }
        }
    }
}

/// Serves one connection until it ends. When the server stops, the connection ends
/// after its running request.
async fn serve(
    stream: impl AsyncRead + AsyncWrite + Socket + Unpin + Send + 'static,
    limits: Limits,
    router: Router,
    mut stopped: watch::Receiver<bool>,
) {
    let (stream, mut input_end) = HalfClosed::new(WriteTimeout::new(stream, limits.body_time));
    let input_end_of_requests = input_end.clone();
    let service = router.map_request(move |mut request: hyper::Request<Incoming>| {
        request.extensions_mut().insert(input_end_of_requests.clone());
        request
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_time)
        .max_buf_size(limits.head_bytes)
        .keep_alive(limits.keeps_alive)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service));
    let mut connection = std::pin::pin!(connection);
    // Connections in the reserve have no keep-alive, so they close after one request.
    if limits.keeps_alive {
        tokio::select! {
            ended = connection.as_mut() => return note(ended),
            _ = stopped.wait_for(|stopped| *stopped) => {}
            () = input_end.hidden() => {}
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
