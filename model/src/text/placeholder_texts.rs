//! What stands for pictures and videos in the text that a chat template renders.

use super::message::{Message, Part};

/// The texts that stand for a picture and for a video.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaceholderTexts {
    /// For a picture.
    pub image: &'static str,
    /// For a video.
    pub video: &'static str,
}

impl PlaceholderTexts {
    /// `message` with its pictures and videos as text, each at its place and with a line break after it, as InternVL's
    /// template that reads lists writes them. All its text is one string.
    pub(super) fn write(&self, message: &Message) -> Message {
        let (mut said, mut rest) = (String::new(), Vec::new());
        for part in message.with_lines().content {
            match part {
                Part::Text(text) => said += &text,
                Part::Image => said.extend([self.image, "\n"]),
                Part::Video => said.extend([self.video, "\n"]),
                part @ (Part::Reasoning(_) | Part::ToolCall(_) | Part::ResultOf(_)) => rest.push(part),
            }
        }
        rest.insert(0, Part::Text(said));
        Message { role: message.role, content: rest }
    }
}
