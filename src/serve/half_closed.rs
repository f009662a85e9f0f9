//! Clients that shut down their sending side after a request (TCP half-close) and wait for the answer.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::Notify,
    time::Instant,
};

/// An end of input within this time after the last bytes counts as a half-close. A later one counts as a disconnect,
/// which cancels the request. TCP does not distinguish the two until the server writes.
const WITH_REQUEST: Duration = Duration::from_millis(100);

/// A connection that hides a half-close from the HTTP server. If the request is incomplete, the timeouts for headers
/// and bodies end it.
pub(super) struct HalfClosed<S> {
    stream: S,
    /// When bytes last came.
    heard: Option<Instant>,
    is_kept_back: bool,
    ended: Arc<Notify>,
}

impl<S> HalfClosed<S> {
    /// `ended` is notified when a half-close is hidden: the client sends no further request.
    pub(super) fn new(stream: S, ended: Arc<Notify>) -> Self {
        HalfClosed { stream, heard: None, is_kept_back: false, ended }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for HalfClosed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.is_kept_back {
            return Poll::Pending;
        }
        let (before, room) = (buffer.filled().len(), buffer.remaining());
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if !matches!(read, Poll::Ready(Ok(()))) || room == 0 {
            return read;
        }
        if buffer.filled().len() > before {
            self.heard = Some(Instant::now());
            return read;
        }
        if self.heard.is_none_or(|heard| heard.elapsed() > WITH_REQUEST) {
            return read;
        }
        self.is_kept_back = true;
        self.ended.notify_one();
        Poll::Pending
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
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt, duplex},
        time::{advance, timeout},
    };

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_end_that_comes_with_a_request_is_kept_back_and_a_later_one_is_not() {
        for (pause_ms, is_kept_back) in [(0, true), (99, true), (101, false)] {
            let ((ours, mut theirs), ended) = (duplex(64), Arc::new(Notify::new()));
            let mut ours = HalfClosed::new(ours, ended.clone());
            theirs.write_all(b"GET").await.expect("it is read");
            ours.read_exact(&mut [0; 3]).await.expect("it comes");
            advance(Duration::from_millis(pause_ms)).await;
            theirs.shutdown().await.expect("it ends");
            let read = timeout(Duration::from_secs(60), ours.read(&mut [0; 3])).await;
            assert_eq!(read.is_err(), is_kept_back, "{pause_ms} ms");
            let told = timeout(Duration::from_secs(1), ended.notified()).await;
            assert_eq!(told.is_ok(), is_kept_back, "{pause_ms} ms");
        }
        let (ours, theirs) = duplex(64);
        drop(theirs);
        let mut ours = HalfClosed::new(ours, Arc::default());
        assert_eq!(ours.read(&mut [0; 3]).await.expect("the end"), 0, "nothing was asked");
    }
}
