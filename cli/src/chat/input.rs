//! Input to a session: lines of standard input, and Ctrl-C.

use std::{
    io::{self, BufRead, stdin},
    thread,
};

use tokio::sync::{mpsc, watch};

/// Returns the lines of standard input. A separate thread reads them, so that a pending read does
/// not keep the process alive.
pub fn lines() -> mpsc::Receiver<io::Result<Vec<u8>>> {
    let (sender, receiver) = mpsc::channel(1);
    thread::spawn(move || {
        for line in stdin().lock().split(b'\n') {
            let is_last = line.is_err();
            if sender.blocking_send(line).is_err() || is_last {
                return;
            }
        }
    });
    receiver
}

/// Catches Ctrl-C, which then no longer ends the process.
pub struct Interrupts(watch::Receiver<()>);

impl Interrupts {
    pub fn listen() -> Self {
        let (pressed, receiver) = watch::channel(());
        tokio::spawn(async move { while tokio::signal::ctrl_c().await.is_ok() && pressed.send(()).is_ok() {} });
        Interrupts(receiver)
    }

    /// Returns at the next Ctrl-C, or at once if Ctrl-C was pressed since the last call.
    pub async fn next(&mut self) {
        if self.0.changed().await.is_err() {
            // Signals are unavailable on this system, so no interrupt will arrive.
            std::future::pending().await
        }
    }
}
