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
    /// `message` with its pictures and videos as text, each on a line of its own.
    pub(super) fn write(&self, message: &Message) -> Message {
        let content = message.content.iter().map(|part| match part {
            Part::Image => Part::Text(format!("{}\n", self.image)),
            Part::Video => Part::Text(format!("{}\n", self.video)),
            part => part.clone(),
        });
        Message { role: message.role, content: content.collect() }
    }
}
