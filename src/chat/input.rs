//! What comes to a session from outside: lines of standard input, and Ctrl-C.

use std::{
    io::{self, BufRead, stdin},
    thread,
};

use tokio::sync::{mpsc, watch};

/// Lines of standard input as they are, read on a thread of their own: one that waits for a line does not keep the process
/// from ending.
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

/// Ctrl-C, heard from now on: it ends the process no more.
pub struct Interrupts(watch::Receiver<()>);

impl Interrupts {
    /// Begins to listen.
    pub fn listen() -> Self {
        let (pressed, receiver) = watch::channel(());
        tokio::spawn(async move { while tokio::signal::ctrl_c().await.is_ok() && pressed.send(()).is_ok() {} });
        Interrupts(receiver)
    }

    /// Returns at the next Ctrl-C; one since the last is not forgotten.
    pub async fn next(&mut self) {
        if self.0.changed().await.is_err() {
            // Nothing can be heard here: none comes.
            std::future::pending().await
        }
    }
}
