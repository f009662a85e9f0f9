//! Signals that ask the program to end.

use std::{io, process, thread, time::Duration};

use tokio::signal::unix::{Signal, SignalKind, signal};

/// How long the program may take to end after the second signal.
const LAST_MOMENTS: Duration = Duration::from_secs(3);

/// Receives SIGINT and SIGTERM. Once this value exists, these signals no longer end the program by
/// default.
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    /// Starts to catch the signals. Also starts a thread that ends the program soon after the
    /// second signal, whatever other threads do.
    pub fn listen() -> io::Result<Self> {
        use signal_hook::consts::{SIGINT, SIGTERM};
        let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM])?;
        let watch = move || {
            if let Some(number) = signals.forever().nth(1) {
                thread::park_timeout(LAST_MOMENTS);
                // The exit code by which shells report a signal.
                process::exit(128 + number);
            }
        };
        thread::Builder::new().name("signals".to_owned()).spawn(watch)?;
        Ok(Signals { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// Waits for the next signal and returns its name.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! { _ = self.interrupt.recv() => "SIGINT", _ = self.terminate.recv() => "SIGTERM" }
    }
}
