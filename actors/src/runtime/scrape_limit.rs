//! Admission to the metrics endpoint: a fixed number of clients, each with a time limit. A new client does not wait for
//! idle ones to leave.

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

/// Clients answered at once. More wait in the system's queue, which is bounded too. A scraper needs one place.
pub(super) const CONNECTIONS_MAX: usize = 64;

/// The time for a whole connection, from the greeting to the last byte. A connection carries one answer. A scrape takes
/// milliseconds, and Prometheus gives up after 10 s.
const CONNECTION_MAX: Duration = Duration::from_secs(5);

/// When all places are taken, a client admitted this long ago may be evicted; a real client has sent its request by
/// then. At this rate 1,000 idle clients, a full system queue, are gone within a second.
const GRACE: Duration = Duration::from_millis(50);

/// Admits clients while there are places.
pub(super) struct Door {
    listener: TcpListener,
    places: Arc<Semaphore>,
    /// Admitted clients, the oldest first. Some may have left already.
    guests: VecDeque<Guest>,
}

/// An admitted client.
struct Guest {
    since: Instant,
    /// Its request has arrived and is being answered.
    is_heard: Arc<AtomicBool>,
    /// Dropping this ends the connection.
    stay: oneshot::Sender<()>,
}

impl Door {
    pub(super) fn new(listener: TcpListener) -> Self {
        Door { listener, places: Arc::new(Semaphore::new(CONNECTIONS_MAX)), guests: VecDeque::new() }
    }

    /// Returns a place. If none is free, it evicts the oldest client that had time to ask and did not, or else the
    /// oldest.
    async fn place(&mut self) -> OwnedSemaphorePermit {
        self.guests.retain(|guest| !guest.stay.is_closed());
        let is_silent = |guest: &Guest| !guest.is_heard.load(Relaxed) && guest.since.elapsed() >= GRACE;
        let longest = self.guests.iter().position(is_silent).unwrap_or(0);
        let free = self.places.clone().acquire_owned();
        let free = match self.guests.get(longest) {
            Some(guest) if self.guests.len() >= CONNECTIONS_MAX => timeout_at(guest.since + GRACE, free).await,
            _ => Ok(free.await),
        };
        let place = match free {
            Ok(place) => place,
            Err(_) => {
                drop(self.guests.remove(longest));
                self.places.clone().acquire_owned().await
            }
        };
        place.expect("the places are never closed")
    }
}

impl Listener for Door {
    type Io = Visit;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Visit, SocketAddr) {
        let (stream, from) = Listener::accept(&mut self.listener).await;
        let place = self.place().await;
        let ((stay, leave), is_heard, since) = (oneshot::channel(), Arc::<AtomicBool>::default(), Instant::now());
        self.guests.push_back(Guest { since, is_heard: is_heard.clone(), stay });
        let over = Box::pin(sleep_until(since + CONNECTION_MAX));
        (Visit { stream, over, leave, is_heard, _place: place }, from)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// An admitted connection. It ends when its time is up or it is evicted.
pub(super) struct Visit {
    stream: TcpStream,
    over: Pin<Box<Sleep>>,
    leave: oneshot::Receiver<()>,
    is_heard: Arc<AtomicBool>,
    _place: OwnedSemaphorePermit,
}

impl Visit {
    /// The stream, while time is left. When time runs out, the waiting task is woken.
    fn in_time(&mut self, context: &mut Context<'_>) -> io::Result<Pin<&mut TcpStream>> {
        let is_over = self.over.as_mut().poll(context).is_ready() || Pin::new(&mut self.leave).poll(context).is_ready();
        if is_over { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Pin::new(&mut self.stream)) }
    }
}

impl AsyncRead for Visit {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.in_time(context)?.poll_read(context, into)
    }
}

impl AsyncWrite for Visit {
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
