//! Key bindings.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    Quit,
    /// Closes the help or the full view, or else quits.
    Back,
    /// Chooses the next model. In the full view, scrolls down one line.
    Next,
    /// Chooses the previous model. In the full view, scrolls up one line.
    Previous,
    First,
    Last,
    /// Opens the full view, or scrolls a page down.
    PageDown,
    /// Scrolls a page up, or from the first page back to the fitted view.
    PageUp,
    /// Stops or resumes scraping.
    Pause,
    Slower,
    Faster,
    /// Opens or closes the help.
    Help,
}

/// Keys and their explanations.
pub const EXPLAINED: [(&str, &str); 7] = [
    ("q, Esc, Ctrl-C", "quit"),
    ("j k, arrows", "next model, previous model"),
    ("g G, Home End", "first model, last model"),
    ("d u, PgDn PgUp", "full view, page by page; Esc leaves it"),
    ("p, space", "pause, resume"),
    ("+ -", "update less often, more often"),
    ("? h", "show or hide this help"),
];

impl Key {
    /// Returns the meaning of a key. `None` if the key has no meaning or is released.
    pub fn of(event: KeyEvent) -> Option<Self> {
        if event.kind == KeyEventKind::Release {
            return None;
        }
        if event.modifiers.contains(KeyModifiers::CONTROL) {
            return matches!(event.code, KeyCode::Char('c' | 'd')).then_some(Key::Quit);
        }
        Some(match event.code {
            KeyCode::Char('q') => Key::Quit,
            KeyCode::Esc => Key::Back,
            KeyCode::Down | KeyCode::Char('j') => Key::Next,
            KeyCode::Up | KeyCode::Char('k') => Key::Previous,
            KeyCode::Home | KeyCode::Char('g') => Key::First,
            KeyCode::End | KeyCode::Char('G') => Key::Last,
            KeyCode::PageDown | KeyCode::Char('d') => Key::PageDown,
            KeyCode::PageUp | KeyCode::Char('u') => Key::PageUp,
            KeyCode::Char('p' | ' ') => Key::Pause,
            KeyCode::Char('+' | '=') => Key::Slower,
            KeyCode::Char('-' | '_') => Key::Faster,
            KeyCode::Char('?' | 'h') => Key::Help,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_press_has_one_meaning() {
        let pressed = |code, modifiers| Key::of(KeyEvent::new(code, modifiers));
        for (code, key) in [
            (KeyCode::Char('q'), Key::Quit),
            (KeyCode::Esc, Key::Back),
            (KeyCode::Down, Key::Next),
            (KeyCode::Char('k'), Key::Previous),
            (KeyCode::Char('G'), Key::Last),
            (KeyCode::Home, Key::First),
            (KeyCode::Char(' '), Key::Pause),
            (KeyCode::PageDown, Key::PageDown),
            (KeyCode::Char('u'), Key::PageUp),
            (KeyCode::Char('='), Key::Slower),
            (KeyCode::Char('-'), Key::Faster),
            (KeyCode::Char('?'), Key::Help),
        ] {
            assert_eq!(pressed(code, KeyModifiers::NONE), Some(key));
        }
        assert_eq!(pressed(KeyCode::Char('c'), KeyModifiers::CONTROL), Some(Key::Quit));
        assert_eq!(pressed(KeyCode::Char('c'), KeyModifiers::NONE), None);
        assert_eq!(pressed(KeyCode::Char('q'), KeyModifiers::CONTROL), None);
        assert_eq!(pressed(KeyCode::Char('G'), KeyModifiers::SHIFT), Some(Key::Last));
        let let_go = KeyEvent::new_with_kind(KeyCode::Char('q'), KeyModifiers::NONE, KeyEventKind::Release);
        assert_eq!(Key::of(let_go), None);
    }
}
