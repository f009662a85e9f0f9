//! The placeholder texts of pictures and videos in the output of a chat template.

use super::message::{ContentPart, Message};

/// The texts that mark a picture and a video in a rendered prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaceholderTexts {
    pub image: &'static str,
    /// `None` for a family without videos.
    pub video: Option<&'static str>,
    /// The text before each placeholder.
    pub before: &'static str,
    /// The text after each placeholder.
    pub after: &'static str,
}

impl PlaceholderTexts {
    /// Replaces the pictures and videos of `message` with placeholder texts, each at its position,
    /// and joins all text into one string. The family's own templates, which read lists of parts,
    /// write the same text, but without line breaks between adjacent texts.
    pub(super) fn write(&self, message: &Message) -> Message {
        let (mut joined, mut rest) = (String::new(), Vec::new());
        for part in message.with_lines().content {
            match part {
                ContentPart::Text(text) => joined += &text,
                ContentPart::Image => joined.extend([self.before, self.image, self.after]),
                ContentPart::Video => {
                    joined.extend(self.video.iter().flat_map(|video| [self.before, video, self.after]))
                }
                part @ (ContentPart::Reasoning(_) | ContentPart::ToolCall(_) | ContentPart::ResultOf(_)) => {
                    rest.push(part)
                }
            }
        }
        rest.insert(0, ContentPart::Text(joined));
        Message { role: message.role, content: rest }
    }
}
