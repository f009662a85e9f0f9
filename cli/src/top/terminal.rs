//! The terminal that the view is drawn on. The terminal is restored however the view ends:
//! normally, with an error, a panic or a signal.

use std::{io, time::Duration};

use ratatui::{
    DefaultTerminal, Frame,
    crossterm::event::{self, Event},
};

use super::keys::Key;

/// A terminal that the view controls.
pub struct Screen {
    terminal: DefaultTerminal,
}

pub enum Input {
    /// A key that has a meaning.
    Key(Key),
    /// A resize, or a key that has no meaning.
    Other,
    /// No input within the given time.
    Nothing,
}

impl Screen {
    /// Takes control of the terminal. If the program panics, the terminal is restored before
    /// the panic is printed.
    ///
    /// # Errors
    /// There is no terminal.
    pub fn take() -> io::Result<Self> {
        give_back_at_signals()?;
        match ratatui::try_init() {
            Ok(terminal) => Ok(Screen { terminal }),
            Err(error) => {
                ratatui::restore();
                Err(error)
            }
        }
    }

    /// Draws a frame.
    ///
    /// # Errors
    /// The terminal is gone.
    pub fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        self.terminal.draw(draw).map(drop)
    }

    /// Waits for input.
    ///
    /// # Errors
    /// The terminal is gone.
    pub fn wait(&self, patience: Duration) -> io::Result<Input> {
        match event::poll(patience) {
            Ok(false) => return Ok(Input::Nothing),
            // A signal interrupted the wait.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(Input::Nothing),
            Err(error) => return Err(error),
            Ok(true) => {}
        }
        Ok(match event::read()? {
            Event::Key(key) => Key::of(key).map_or(Input::Other, Input::Key),
            _ => Input::Other,
        })
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Starts a thread that restores the terminal after a signal. Keys do not send signals while the
/// view controls the terminal. Signals from other processes still have their default effect, after
/// the terminal is restored.
///
/// The thread is needed because crossterm never returns from a read on a lost terminal (SIGHUP): it
/// retries the read forever.
#[cfg(unix)]
fn give_back_at_signals() -> io::Result<()> {
    use std::{sync::mpsc, thread};

    use ratatui::crossterm::{cursor, execute};
    use signal_hook::{
        consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM},
        iterator::Signals,
        low_level::emulate_default_handler,
    };
    const GIVE_BACK_MAX: Duration = Duration::from_millis(500);
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGQUIT, SIGTERM])?;
    let watch = move || {
        for signal in signals.forever() {
            let (done, is_done) = mpsc::sync_channel::<()>(0);
            let give_back = move || {
                // A lost terminal accepts neither a reset nor a message.
                drop(ratatui::try_restore());
                drop(execute!(io::stdout(), cursor::Show));
                drop(done);
            };
            drop(thread::Builder::new().spawn(give_back));
            // The wait has a time limit, because a lost terminal may accept nothing.
            let _ = is_done.recv_timeout(GIVE_BACK_MAX);
            drop(emulate_default_handler(signal));
        }
    };
    thread::Builder::new().name("signals".into()).spawn(watch).map(drop)
}

#[cfg(not(unix))]
fn give_back_at_signals() -> io::Result<()> {
    Ok(())
}
