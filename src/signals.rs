//! Signals that ask the program to end.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// From when it is made on, they no longer end the program by themselves.
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    pub fn hear() -> io::Result<Self> {
        Ok(Signals { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// The name of the next one.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! { _ = self.interrupt.recv() => "SIGINT", _ = self.terminate.recv() => "SIGTERM" }
    }
}
