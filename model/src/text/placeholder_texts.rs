//! What stands for pictures and videos in the text that a chat template renders.

use super::message::{Message, Part};

/// The texts that mark a picture and a video in a rendered prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaceholderTexts {
    /// For a picture.
    pub image: &'static str,
    /// For a video.
    pub video: &'static str,
    /// Written before each of them.
    pub before: &'static str,
    /// Written after each of them.
    pub after: &'static str,
}

impl PlaceholderTexts {
    /// `message` with its pictures and videos as text, each at its position, as the family's
    /// template that reads lists writes them. All its text is one string.
    pub(super) fn write(&self, message: &Message) -> Message {
        let (mut said, mut rest) = (String::new(), Vec::new());
        for part in message.with_lines().content {
            match part {
                Part::Text(text) => said += &text,
                Part::Image => said.extend([self.before, self.image, self.after]),
                Part::Video => said.extend([self.before, self.video, self.after]),
                part @ (Part::Reasoning(_) | Part::ToolCall(_) | Part::ResultOf(_)) => rest.push(part),
            }
        }
        rest.insert(0, Part::Text(said));
        Message { role: message.role, content: rest }
    }
}
