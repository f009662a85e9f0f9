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
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    task::JoinSet,
    time::{Instant, sleep_until, timeout},
};
use tokio_rustls::{TlsAcceptor, rustls};

use super::{options::ServeOptions, patience::Patient, service::Service};
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
        let router = service.whole(address.ip().is_loopback());
        let serving = Accepting { listener, acceptor, service: service.clone(), router, stopped };
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

    /// Takes no more connections and refuses new requests, and returns when the running ones have ended, or after
    /// [`drain`](super::ServeOptions::drain). Then those that are left are cut off.
    pub async fn shutdown(mut self) {
        self.service.end();
        self.stop.send_replace(true);
        drop(timeout(self.service.options().drain, &mut self.serving).await);
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
    stopped: watch::Receiver<bool>,
}

impl Accepting {
    async fn run(mut self) {
        let limit = self.service.options().connections.clamp(1, Semaphore::MAX_PERMITS);
        let permits = Arc::new(Semaphore::new(limit));
        let mut connections = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                _ = self.stopped.wait_for(|stopped| *stopped) => break,
                accepted = accept(&self.listener, &permits) => accepted,
                // Ended ones are forgotten as they end.
                Some(_) = connections.join_next() => continue,
            };
            let (stream, permit) = accepted;
            connections.spawn(self.connection(stream, permit));
        }
        drop(self.listener);
        while connections.join_next().await.is_some() {}
    }

    fn connection(&self, stream: TcpStream, permit: OwnedSemaphorePermit) -> impl Future<Output = ()> + Send + use<> {
        let (service, stopped, acceptor) = (self.service.clone(), self.stopped.clone(), self.acceptor.clone());
        let router = self.router.clone();
        async move {
            let options = service.options();
            // Small chunks of a stream must not wait for each other.
            drop(stream.set_nodelay(true));
            let head_time = options.head_time;
            match acceptor {
                None => serve(stream, service.options(), router, stopped).await,
                // A client that does not finish its greeting has as long as for a head.
                Some(acceptor) => {
                    if let Ok(Ok(stream)) = timeout(head_time, acceptor.accept(stream)).await {
                        serve(stream, service.options(), router, stopped).await;
                    }
                }
            }
            drop(permit);
        }
    }
}

/// The next connection, as soon as there is a permit for it.
async fn accept(listener: &TcpListener, permits: &Arc<Semaphore>) -> (TcpStream, OwnedSemaphorePermit) {
    /// The system may have no descriptors left; connections that end give some back.
    const PAUSE: Duration = Duration::from_millis(50);
    loop {
        let Ok(permit) = permits.clone().acquire_owned().await else {
            std::future::pending::<()>().await;
            continue;
        };
        match listener.accept().await {
            Ok((stream, _)) => return (stream, permit),
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                sleep_until(Instant::now() + PAUSE).await;
            }
        }
    }
}

/// Serves one connection until it ends, or until its running request has ended when the server stops.
async fn serve(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    options: &ServeOptions,
    router: Router,
    mut stopped: watch::Receiver<bool>,
) {
    let io = TokioIo::new(Patient::new(stream, options.body_time));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(options.head_time)
        .max_buf_size(options.head_bytes.as_usize().max(8192))
        .serve_connection(io, TowerToHyperService::new(router));
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        ended = connection.as_mut() => return note(ended),
        _ = stopped.wait_for(|stopped| *stopped) => connection.as_mut().graceful_shutdown(),
    }
    note(connection.await);
}

fn note(ended: Result<(), hyper::Error>) {
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection broke");
    }
}
