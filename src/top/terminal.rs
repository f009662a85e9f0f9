//! The terminal while the view is on it. It is as it was before behind every end: ours, an error's, a panic's and a
//! signal's.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use ratatui::{
    DefaultTerminal, Frame,
    crossterm::event::{self, Event},
};
#[cfg(unix)]
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    flag,
};

use super::keys::Key;

/// A terminal that is ours.
pub struct Screen {
    terminal: DefaultTerminal,
    is_told_to_end: Arc<AtomicBool>,
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
        let is_told_to_end = Arc::new(AtomicBool::new(false));
        // Keys are no signals while the terminal is ours; these come from elsewhere.
        #[cfg(unix)]
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            flag::register(signal, is_told_to_end.clone())?;
        }
        match ratatui::try_init() {
            Ok(terminal) => Ok(Screen { terminal, is_told_to_end }),
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
        if self.is_told_to_end.load(Ordering::Relaxed) {
            return Ok(Input::Key(Key::Quit));
        }
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
