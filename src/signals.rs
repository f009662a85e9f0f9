//! Signals that ask the program to end.

use std::{io, process, thread, time::Duration};

use tokio::signal::unix::{Signal, SignalKind, signal};

/// How long the program may take to end after the second signal.
const LAST_MOMENTS: Duration = Duration::from_secs(3);

/// From when it is made on, they no longer end the program by themselves.
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    /// Also starts a thread that ends the program soon after the second signal, whatever the others do.
    pub fn hear() -> io::Result<Self> {
        use signal_hook::consts::{SIGINT, SIGTERM};
        let mut heard = signal_hook::iterator::Signals::new([SIGINT, SIGTERM])?;
        let watch = move || {
            if let Some(number) = heard.forever().nth(1) {
                thread::park_timeout(LAST_MOMENTS);
                // As shells tell of a signal.
                process::exit(128 + number);
            }
        };
        thread::Builder::new().name("signals".to_owned()).spawn(watch)?;
        Ok(Signals { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// The name of the next one.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! { _ = self.interrupt.recv() => "SIGINT", _ = self.terminate.recv() => "SIGTERM" }
    }
}
