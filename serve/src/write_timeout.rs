//! Timeout for clients that stop reading.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep_until},
};

use super::half_closed::Socket;

/// A connection that fails if a write is blocked for `limit` because the client reads nothing. A
/// client that stops reading would otherwise hold the memory of its reply.
pub(super) struct WriteTimeout<S> {
    stream: S,
    limit: Duration,
    /// Timer that runs while a write is blocked. `None` while no write is blocked.
    timer: Option<Pin<Box<Sleep>>>,
}

impl<S> WriteTimeout<S> {
    pub(super) fn new(stream: S, limit: Duration) -> Self {
        WriteTimeout { stream, limit, timer: None }
    }

    fn hold<T>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.timer = None;
            return written;
        }
        let until = Instant::now() + self.limit;
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(until)));
        match timer.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: Socket> Socket for WriteTimeout<S> {
    fn socket_error(&self) -> io::Result<Option<io::Error>> {
        self.stream.socket_error()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteTimeout<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteTimeout<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.hold(context, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.hold(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(context);
        self.hold(context, shut)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.hold(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_client_is_dropped_if_it_stops_reading() {
        let limit = Duration::from_secs(10);
        let (ours, mut theirs) = duplex(4);
        let mut ours = WriteTimeout::new(ours, limit);
        let writing = tokio::spawn(async move { ours.write_all(b"twelve bytes").await });
        let mut buffer = [0; 4];
        for _ in 0..2 {
            sleep_until(Instant::now() + Duration::from_secs(9)).await;
            theirs.read_exact(&mut buffer).await.expect("the bytes arrive");
        }
        assert!(writing.await.expect("the write ends").is_ok(), "each single wait was shorter than the limit");
        let (ours, _theirs) = duplex(4);
        let error =
            WriteTimeout::new(ours, limit).write_all(b"twelve bytes").await.expect_err("the client never reads");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
