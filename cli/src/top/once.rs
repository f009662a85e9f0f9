//! The view as text, printed once.

use std::io::{self, Write};

use ratatui::{
    backend::IntoCrossterm,
    crossterm::style::{ContentStyle, StyledContent},
    style::Style,
    text::Line,
};

use super::palette::Colors;

/// Prints lines, with colors if there are any, and without trailing blanks in plain text.
///
/// # Errors
/// Writing to `out` fails.
pub fn print(out: &mut impl Write, lines: &[Line<'_>], colors: Colors) -> io::Result<()> {
    for line in lines {
        match colors {
            Colors::None => writeln!(out, "{}", line.to_string().trim_end())?,
            _ => {
                for span in &line.spans {
                    let style: ContentStyle = Style::new().patch(line.style).patch(span.style).into_crossterm();
                    write!(out, "{}", StyledContent::new(style, &span.content))?;
                }
                writeln!(out)?;
            }
        }
    }
    out.flush()
}

#[cfg(test)]
mod tests {
    use ratatui::{style::Color, text::Span};

    use super::*;

    fn printed(colors: Colors) -> String {
        let mut out = Vec::new();
        let line = Line::from(vec![Span::raw("a "), Span::styled("b  ", Style::new().fg(Color::Rgb(1, 2, 3)))]);
        print(&mut out, &[line], colors).expect("writing to memory succeeds");
        String::from_utf8(out).expect("UTF-8")
    }

    #[test]
    fn plain_text_is_printed_without_colors() {
        assert_eq!(printed(Colors::None), "a b\n");
    }

    #[test]
    fn colors_end_where_their_text_ends() {
        ratatui::crossterm::style::force_color_output(true);
        assert_eq!(printed(Colors::True), "a \u{1b}[38;2;1;2;3mb  \u{1b}[39m\n");
    }
}
