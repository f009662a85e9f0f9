//! Colors, and letters that replace them.

use std::ffi::OsStr;

use ratatui::style::{Color, Modifier, Style};

use super::view::MemoryPart;

/// When to use colors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum When {
    /// On a terminal that supports colors, unless NO_COLOR is set.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// The colors that a terminal can show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colors {
    True,
    /// The sixteen colors of the user's theme.
    Sixteen,
    /// No colors. Letters distinguish the parts.
    None,
}

/// The settings of the terminal.
#[derive(Clone, Copy, Debug, Default)]
pub struct Surroundings<'a> {
    /// The environment variable `NO_COLOR` (no-color.org).
    pub no_color: Option<&'a OsStr>,
    pub colorterm: Option<&'a OsStr>,
    pub term: Option<&'a OsStr>,
    /// Whether the output goes to a terminal.
    pub is_terminal: bool,
}

impl Colors {
    pub fn of(when: When, surroundings: Surroundings<'_>) -> Self {
        let is_unwanted = surroundings.no_color.is_some_and(|value| !value.is_empty());
        let is_dumb = surroundings.term.is_some_and(|term| term == "dumb");
        let has_all = surroundings.colorterm.is_some_and(|value| value == "truecolor" || value == "24bit");
        match when {
            When::Never => Colors::None,
            When::Auto if is_unwanted || is_dumb || !surroundings.is_terminal => Colors::None,
            _ if has_all => Colors::True,
            _ => Colors::Sixteen,
        }
    }

    /// Returns the color of a part of the bar. `None` if a letter marks the part.
    pub fn part(self, part: MemoryPart) -> Option<Color> {
        match self {
            Colors::True => Some(true_color(part)),
            Colors::Sixteen => Some(one_of_sixteen(part)),
            Colors::None => None,
        }
    }

    /// Style of titles and names.
    pub fn strong(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    /// Style of text that matters less.
    pub fn faint(self) -> Style {
        match self {
            Colors::True => Style::new().fg(Color::Rgb(0x8b, 0x94, 0x9e)),
            // Dark gray is the background color of some themes.
            Colors::Sixteen => Style::new().add_modifier(Modifier::DIM),
            Colors::None => Style::new(),
        }
    }

    /// Style of text about a normal state.
    pub fn good(self) -> Style {
        self.colored(Color::Rgb(0x3f, 0xb9, 0x50), Color::Green)
    }

    /// Style of text about a notable state.
    pub fn notable(self) -> Style {
        self.colored(Color::Rgb(0xd2, 0x99, 0x22), Color::Yellow)
    }

    /// Style of text about a problem.
    pub fn bad(self) -> Style {
        self.colored(Color::Rgb(0xf8, 0x51, 0x49), Color::Red).add_modifier(Modifier::BOLD)
    }

    /// Style of the chosen row.
    pub fn chosen(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    fn colored(self, true_color: Color, one_of_sixteen: Color) -> Style {
        match self {
            Colors::True => Style::new().fg(true_color),
            Colors::Sixteen => Style::new().fg(one_of_sixteen),
            Colors::None => Style::new(),
        }
    }
}

fn true_color(part: MemoryPart) -> Color {
    let (red, green, blue) = match part {
        MemoryPart::Overhead => (0x6e, 0x76, 0x81),
        MemoryPart::Foreign => (0xa3, 0x6a, 0x5e),
        MemoryPart::Weights => (0x38, 0x8b, 0xfd),
        MemoryPart::KvUsed => (0x2e, 0xa0, 0x43),
        MemoryPart::KvCached => (0x7e, 0xe7, 0x87),
        MemoryPart::KvFree => (0x1f, 0x5c, 0x36),
        MemoryPart::States => (0xb3, 0xc7, 0x2e),
        MemoryPart::StepWorkspace => (0x89, 0x57, 0xe5),
        MemoryPart::VisionWorkspace => (0xd2, 0xa8, 0xff),
        MemoryPart::VisionCache => (0xdb, 0x61, 0xa2),
        MemoryPart::Graphs => (0x39, 0xc5, 0xcf),
        MemoryPart::Tenants => (0xf0, 0x88, 0x3e),
        MemoryPart::Other => (0xff, 0x7b, 0x72),
        MemoryPart::Canary => (0xf2, 0xcc, 0x60),
        MemoryPart::Free => (0x48, 0x4f, 0x58),
    };
    Color::Rgb(red, green, blue)
}

fn one_of_sixteen(part: MemoryPart) -> Color {
    match part {
        MemoryPart::Overhead => Color::DarkGray,
        MemoryPart::Foreign => Color::White,
        MemoryPart::Weights => Color::Blue,
        MemoryPart::KvUsed => Color::Green,
        MemoryPart::KvCached => Color::LightGreen,
        MemoryPart::KvFree => Color::Cyan,
        MemoryPart::States => Color::LightYellow,
        MemoryPart::StepWorkspace => Color::Magenta,
        MemoryPart::VisionWorkspace => Color::LightMagenta,
        MemoryPart::VisionCache => Color::LightBlue,
        MemoryPart::Graphs => Color::LightCyan,
        MemoryPart::Tenants => Color::Red,
        MemoryPart::Other => Color::LightRed,
        MemoryPart::Canary => Color::Yellow,
        MemoryPart::Free => Color::Gray,
    }
}

/// Returns the letter that marks a part without colors.
pub fn letter(part: MemoryPart) -> char {
    match part {
        MemoryPart::Overhead => 'o',
        MemoryPart::Foreign => 'f',
        MemoryPart::Weights => 'W',
        MemoryPart::KvUsed => 'K',
        MemoryPart::KvCached => 'k',
        MemoryPart::KvFree => '-',
        MemoryPart::States => 's',
        MemoryPart::StepWorkspace => 'S',
        MemoryPart::VisionWorkspace => 'V',
        MemoryPart::VisionCache => 'v',
        MemoryPart::Graphs => 'G',
        MemoryPart::Tenants => 'T',
        MemoryPart::Other => 'x',
        MemoryPart::Canary => 'C',
        MemoryPart::Free => '.',
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn colors_depend_on_the_terminal_and_the_users_choice() {
        let terminal = Surroundings { is_terminal: true, ..Surroundings::default() };
        let set = |text: &'static str| Some(OsStr::new(text));
        assert_eq!(Colors::of(When::Auto, terminal), Colors::Sixteen);
        let all = Surroundings { colorterm: set("truecolor"), ..terminal };
        assert_eq!(Colors::of(When::Auto, all), Colors::True);
        assert_eq!(Colors::of(When::Auto, Surroundings { colorterm: set("24bit"), ..terminal }), Colors::True);
        assert_eq!(Colors::of(When::Never, all), Colors::None);
        assert_eq!(Colors::of(When::Auto, Surroundings { is_terminal: false, ..all }), Colors::None);
        assert_eq!(Colors::of(When::Always, Surroundings { is_terminal: false, ..all }), Colors::True);
        let unwanted = Surroundings { no_color: set("1"), ..all };
        assert_eq!(Colors::of(When::Auto, unwanted), Colors::None);
        assert_eq!(Colors::of(When::Always, unwanted), Colors::True, "a typed choice overrides the environment");
        assert_eq!(Colors::of(When::Auto, Surroundings { no_color: set(""), ..all }), Colors::True);
        assert_eq!(Colors::of(When::Auto, Surroundings { term: set("dumb"), ..all }), Colors::None);
    }

    #[test]
    fn memory_parts_have_distinct_colors_and_letters() {
        for colors in [Colors::True, Colors::Sixteen] {
            let all: BTreeSet<_> = MemoryPart::ALL.iter().map(|part| format!("{:?}", colors.part(*part))).collect();
            assert_eq!(all.len(), MemoryPart::ALL.len(), "{colors:?}");
        }
        let letters: BTreeSet<_> = MemoryPart::ALL.iter().map(|part| letter(*part)).collect();
        assert_eq!(letters.len(), MemoryPart::ALL.len());
    }
}
