//! The terminal while the view is on it. It is as it was before behind every end: ours, an error's, a panic's and a
//! signal's.

use std::{io, time::Duration};

use ratatui::{
    DefaultTerminal, Frame,
    crossterm::event::{self, Event},
};

use super::keys::Key;

/// A terminal that is ours.
pub struct Screen {
    terminal: DefaultTerminal,
}

/// What somebody did at the terminal.
pub enum Input {
    /// A key that means something.
    Key(Key),
    /// Another size, or a key that means nothing.
    Other,
    /// Nothing in time.
    Nothing,
}

impl Screen {
    /// Takes the terminal. A panic gives it back before it is told.
    ///
    /// # Errors
    /// Where there is none.
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

    /// Draws.
    ///
    /// # Errors
    /// Where the terminal is gone.
    pub fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        self.terminal.draw(draw).map(drop)
    }

    /// Waits for somebody to do something.
    ///
    /// # Errors
    /// Where the terminal is gone.
    pub fn wait(&self, patience: Duration) -> io::Result<Input> {
        match event::poll(patience) {
            Ok(false) => return Ok(Input::Nothing),
            // A signal came in between.
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

/// Keys are no signals while the terminal is ours; these come from elsewhere, and have their usual effect behind it.
///
/// On a thread of its own: crossterm reads a terminal that has gone (SIGHUP) again and again, and never comes back to look.
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
                // A terminal that has gone takes nothing back, nor a word about it.
                drop(ratatui::try_restore());
                drop(execute!(io::stdout(), cursor::Show));
                drop(done);
            };
            drop(thread::Builder::new().spawn(give_back));
            // One that takes nothing any more holds nobody up.
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
