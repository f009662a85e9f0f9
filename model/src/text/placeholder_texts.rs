//! What stands for pictures and videos in chat templates that know no pictures.

use super::message::{Message, Part};

/// The texts that stand for a picture and for a video where a template joins strings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaceholderTexts {
    /// For a picture.
    pub image: String,
    /// For a video.
    pub video: String,
}

impl PlaceholderTexts {
    /// `message` with its pictures and videos as text, in their places.
    pub(super) fn write(&self, message: &Message) -> Message {
        let content = message.content.iter().map(|part| match part {
            Part::Image => Part::Text(self.image.clone()),
            Part::Video => Part::Text(self.video.clone()),
            part => part.clone(),
        });
        Message { role: message.role, content: content.collect() }
    }
}
