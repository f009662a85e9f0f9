//! Clients that shut down their sending side after a request (TCP half-close) and
//! wait for the answer.

use std::{
    future::pending,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    sync::watch,
    time::{Instant, Sleep, sleep_until},
};
use tokio_rustls::server::TlsStream;

/// An end of input within this time after the last bytes counts as a half-close. A later end counts
/// as a disconnect, which cancels the request. TCP shows the difference only when the server
/// writes.
const WITH_REQUEST: Duration = Duration::from_millis(100);
/// Interval at which a half-closed connection is checked. If the client has reset it, the request
/// is canceled.
const CHECK_EVERY: Duration = Duration::from_secs(1);

/// A stream that can return the error of its socket. After the end of input, reads no longer
/// return this error.
pub(super) trait Socket {
    /// The socket's pending error (SO_ERROR), such as a reset by the peer.
    fn socket_error(&self) -> io::Result<Option<io::Error>>;
}

impl Socket for TcpStream {
    fn socket_error(&self) -> io::Result<Option<io::Error>> {
        self.take_error()
    }
}

impl Socket for TlsStream<TcpStream> {
    fn socket_error(&self) -> io::Result<Option<io::Error>> {
        self.get_ref().0.take_error()
    }
}

/// Reports that the end of a connection's input was hidden from the HTTP server. A request body
/// that is incomplete then stays incomplete.
#[derive(Clone, Debug)]
pub(super) struct InputEnd(watch::Receiver<bool>);

impl InputEnd {
    /// Waits until an end of input is hidden.
    pub(super) async fn hidden(&mut self) {
        if self.0.wait_for(|is_hidden| *is_hidden).await.is_err() {
            // The connection is gone, and the HTTP server ends its requests.
            pending().await
        }
    }
}

/// A connection that hides a half-close from the HTTP server. If the headers are incomplete, their
/// timeout ends the request. If the body is incomplete, [`InputEnd`] does.
pub(super) struct HalfClosed<S> {
    stream: S,
    /// Time of the last received bytes.
    last_received: Option<Instant>,
    /// Timer for the next check, if an end of input was hidden.
    check: Option<Pin<Box<Sleep>>>,
    ended: watch::Sender<bool>,
}

impl<S> HalfClosed<S> {
    /// Wraps a stream. The second value reports when a half-close is hidden. The client then sends
    /// no further request, so the connection can end after its running request.
    pub(super) fn new(stream: S) -> (Self, InputEnd) {
        let (ended, end) = watch::channel(false);
        (HalfClosed { stream, last_received: None, check: None, ended }, InputEnd(end))
    }
}

impl<S: Socket> HalfClosed<S> {
    /// Polls for an error of the socket, if its end of input was hidden.
    fn poll_error(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(check) = &mut self.check else { return Poll::Pending };
        loop {
            ready!(check.as_mut().poll(context));
            if let Some(error) = self.stream.socket_error()? {
                return Poll::Ready(Err(error));
            }
            check.as_mut().reset(Instant::now() + CHECK_EVERY);
        }
    }
}

impl<S: AsyncRead + Socket + Unpin> AsyncRead for HalfClosed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.check.is_some() {
            return self.poll_error(context);
        }
        let (before, remaining) = (buffer.filled().len(), buffer.remaining());
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if !matches!(read, Poll::Ready(Ok(()))) || remaining == 0 {
            return read;
        }
        if buffer.filled().len() > before {
            self.last_received = Some(Instant::now());
            return read;
        }
        if self.last_received.is_none_or(|last_received| last_received.elapsed() > WITH_REQUEST) {
            return read;
        }
        self.ended.send_replace(true);
        self.check = Some(Box::pin(sleep_until(Instant::now() + CHECK_EVERY)));
        self.poll_error(context)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for HalfClosed<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt, duplex},
        net::TcpListener,
        time::{advance, timeout},
    };

    use super::*;

    impl Socket for tokio::io::DuplexStream {
        fn socket_error(&self) -> io::Result<Option<io::Error>> {
            Ok(None)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_half_close_soon_after_a_request_is_held_back() {
        for (pause_ms, is_kept_back) in [(0, true), (99, true), (101, false)] {
            let (ours, mut theirs) = duplex(64);
            let (mut ours, mut end) = HalfClosed::new(ours);
            theirs.write_all(b"GET").await.expect("the bytes are written");
            ours.read_exact(&mut [0; 3]).await.expect("the bytes arrive");
            advance(Duration::from_millis(pause_ms)).await;
            theirs.shutdown().await.expect("the stream closes");
            let read = timeout(Duration::from_secs(60), ours.read(&mut [0; 3])).await;
            assert_eq!(read.is_err(), is_kept_back, "{pause_ms} ms");
            let is_kept = timeout(Duration::from_secs(1), end.hidden()).await;
            assert_eq!(is_kept.is_ok(), is_kept_back, "{pause_ms} ms");
        }
        let (ours, theirs) = duplex(64);
        drop(theirs);
        let (mut ours, _) = HalfClosed::new(ours);
        assert_eq!(ours.read(&mut [0; 3]).await.expect("the end"), 0, "no request was sent");
    }

    #[tokio::test]
    async fn a_connection_reset_after_a_half_close_is_noticed() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port is free");
        let mut theirs = TcpStream::connect(listener.local_addr().expect("bound")).await.expect("the listener accepts");
        let ours = listener.accept().await.expect("a client").0;
        let (mut ours, _) = HalfClosed::new(ours);
        theirs.write_all(b"GET").await.expect("the bytes are written");
        theirs.shutdown().await.expect("the stream closes");
        ours.read_exact(&mut [0; 3]).await.expect("the bytes arrive");
        let read = timeout(CHECK_EVERY * 5 / 2, ours.read(&mut [0; 3])).await;
        assert!(read.is_err(), "the end of the stream is held back");
        theirs.set_zero_linger().expect("linger is set");
        drop(theirs);
        let read = timeout(Duration::from_secs(30), ours.read(&mut [0; 3])).await.expect("a check in time");
        read.expect_err("the connection was reset");
    }
}
