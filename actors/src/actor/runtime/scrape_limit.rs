//! Admission to the metrics endpoint: a fixed number of clients, each with a time limit. A new
//! client need not wait until idle clients disconnect, because idle clients are evicted.

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::serve::Listener;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
    time::{Instant, Sleep, sleep_until, timeout_at},
};

/// Maximum number of clients that are served at once. More clients wait in the operating system's
/// accept queue, which is bounded too. A scraper needs one connection.
pub(super) const CONNECTIONS_MAX: usize = 64;

/// Time limit of a connection, from its acceptance to the last byte. A connection serves one
/// request. A scrape takes milliseconds, and Prometheus gives up after 10 s.
const CONNECTION_MAX: Duration = Duration::from_secs(5);

/// If all connection slots are taken, a client that was admitted this long ago may be evicted. A
/// real client has sent its request by then. At this rate, 1,000 idle clients (a full accept queue)
/// are evicted within a second.
const GRACE: Duration = Duration::from_millis(50);

/// Admits clients while there are free connection slots.
pub(super) struct ScrapeLimit {
    listener: TcpListener,
    places: Arc<Semaphore>,
    /// Admitted clients, oldest first. Some may have disconnected already.
    clients: VecDeque<Client>,
}

struct Client {
    since: Instant,
    /// Whether the client's request has arrived and is being answered.
    is_heard: Arc<AtomicBool>,
    /// Dropping this sender ends the connection.
    stay: oneshot::Sender<()>,
}

impl ScrapeLimit {
    pub(super) fn new(listener: TcpListener) -> Self {
        ScrapeLimit { listener, places: Arc::new(Semaphore::new(CONNECTIONS_MAX)), clients: VecDeque::new() }
    }

    /// Returns a connection slot. If all slots are taken, evicts the oldest client that had time to
    /// send a request and did not. If there is no such client, evicts the oldest client.
    async fn place(&mut self) -> OwnedSemaphorePermit {
        self.clients.retain(|client| !client.stay.is_closed());
        let is_silent = |client: &Client| !client.is_heard.load(Relaxed) && client.since.elapsed() >= GRACE;
        let longest = self.clients.iter().position(is_silent).unwrap_or(0);
        let free = self.places.clone().acquire_owned();
        let free = match self.clients.get(longest) {
            Some(client) if self.clients.len() >= CONNECTIONS_MAX => timeout_at(client.since + GRACE, free).await,
            _ => Ok(free.await),
        };
        let place = match free {
            Ok(place) => place,
            Err(_) => {
                drop(self.clients.remove(longest));
                self.places.clone().acquire_owned().await
            }
        };
        place.expect("the semaphore is never closed")
    }
}

impl Listener for ScrapeLimit {
    type Io = ScrapeConnection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (ScrapeConnection, SocketAddr) {
        let (stream, from) = Listener::accept(&mut self.listener).await;
        let place = self.place().await;
        let ((stay, leave), is_heard, since) = (oneshot::channel(), Arc::<AtomicBool>::default(), Instant::now());
        self.clients.push_back(Client { since, is_heard: is_heard.clone(), stay });
        let over = Box::pin(sleep_until(since + CONNECTION_MAX));
        (ScrapeConnection { stream, over, leave, is_heard, _place: place }, from)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// An admitted connection. It ends when its time limit is reached or when it is evicted.
pub(super) struct ScrapeConnection {
    stream: TcpStream,
    over: Pin<Box<Sleep>>,
    leave: oneshot::Receiver<()>,
    is_heard: Arc<AtomicBool>,
    _place: OwnedSemaphorePermit,
}

impl ScrapeConnection {
    /// Returns the stream, or an error once the time limit is reached or the client is evicted.
    /// Both events wake the task that polls.
    fn in_time(&mut self, context: &mut Context<'_>) -> io::Result<Pin<&mut TcpStream>> {
        let is_over = self.over.as_mut().poll(context).is_ready() || Pin::new(&mut self.leave).poll(context).is_ready();
        if is_over { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Pin::new(&mut self.stream)) }
    }
}

impl AsyncRead for ScrapeConnection {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.in_time(context)?.poll_read(context, into)
    }
}

impl AsyncWrite for ScrapeConnection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.is_heard.store(true, Relaxed);
        self.in_time(context)?.poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.in_time(context)?.poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.in_time(context)?.poll_shutdown(context)
    }
}
