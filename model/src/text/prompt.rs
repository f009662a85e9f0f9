//! Prompts: conversations encoded as token ids, in which only the template can write special
//! tokens.

use std::sync::Arc;

use super::chat_template::{ChatTemplate, TemplateInputs, collect_json};
use super::error::TextError;
use super::message::{ContentPart, Message};
use super::placeholder_texts::PlaceholderTexts;
use super::special_guard::SpecialGuard;
use super::tokenizer::Tokenizer;

/// Texts longer in total than about `tokens_max * BYTES_PER_TOKEN` bytes are tokenized and counted
/// before the prompt is rendered. In English, a token has about four bytes.
const BYTES_PER_TOKEN: usize = 8;

/// Renders and encodes conversations. Cloning shares the tokenizer and the template.
///
/// For text without names of special tokens, the tokens equal those of Hugging Face's
/// `apply_chat_template`. A name of a special token in a user's text (`<|im_start|>`,
/// `<|image_pad|>`) is encoded as plain characters, so that users cannot forge a turn or a picture.
/// Hugging Face encodes such a name as the special token.
#[derive(Clone, Debug)]
pub struct PromptEncoder {
    tokenizer: Tokenizer,
    template: Arc<ChatTemplate>,
    guard: SpecialGuard,
    /// The placeholder texts, if the template does not support pictures.
    placeholders: Option<PlaceholderTexts>,
}

impl PromptEncoder {
    pub fn new(tokenizer: Tokenizer, template: impl Into<Arc<ChatTemplate>>) -> Self {
        let guard = tokenizer.guard().clone();
        PromptEncoder { tokenizer, template: template.into(), guard, placeholders: None }
    }

    /// The same encoder for a model family that finds pictures and videos in the rendered text by
    /// the placeholders `texts`. Placeholders in a user's text are not taken for pictures or
    /// videos. A template that does not support pictures gets messages in which pictures and videos
    /// are already replaced by placeholder text.
    pub fn with_placeholders(mut self, texts: Option<PlaceholderTexts>) -> Self {
        if let Some(texts) = &texts {
            self.guard = self.guard.with([Some(texts.image), texts.video].into_iter().flatten());
        }
        self.placeholders = texts.filter(|texts| !self.template.knows_pictures(texts.image));
        self
    }

    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }

    /// Token ids of a conversation, with one placeholder per picture or video. The family later
    /// replaces each placeholder with one placeholder token per embedding. A family that writes
    /// more than placeholders into the prompt needs [`encode_rewritten`](Self::encode_rewritten)
    /// with [`FamilyConfig::write_visuals`](crate::registry::FamilyConfig::write_visuals).
    ///
    /// # Errors
    /// Same as [`ChatTemplate::render`] and [`Tokenizer::encode`].
    pub fn encode(&self, messages: &[Message], inputs: &TemplateInputs) -> Result<Vec<u32>, TextError> {
        self.encode_rewritten(messages, inputs, usize::MAX, |rendered| rendered)
    }

    /// Same as [`encode`](Self::encode), with `rewrite` applied to the rendered text before it is
    /// encoded. Names of special tokens in that text never come from a user. Encoding stops as soon
    /// as it is clear that there will be more than `tokens_max` tokens.
    ///
    /// # Errors
    /// Same as [`encode`](Self::encode), and [`TextError::TooManyTokens`].
    pub fn encode_rewritten(
        &self,
        messages: &[Message],
        inputs: &TemplateInputs,
        tokens_max: usize,
        rewrite: impl FnOnce(String) -> String,
    ) -> Result<Vec<u32>, TextError> {
        self.check_length(messages, inputs, tokens_max)?;
        let written = written_texts(messages, inputs);
        if !written.iter().any(|text| self.is_suspect(text)) {
            return self.tokenizer.encode_up_to(&rewrite(self.render(messages, inputs)?), false, tokens_max);
        }
        let sources = self.template.sources().templates.values().map(String::as_str);
        let mark = SpecialGuard::unused_mark(written.iter().copied().chain(sources))
            .ok_or(TextError::Encode { bytes: written.iter().map(|text| text.len()).sum() })?;
        let guard = &self.guard;
        let messages: Vec<_> = messages.iter().map(|message| marked_message(message, guard, mark)).collect();
        let mut inputs = inputs.clone();
        inputs.tools.iter_mut().flatten().for_each(|tool| mark_json(tool, guard, mark));
        inputs.variables.values_mut().for_each(|value| mark_json(value, guard, mark));
        self.encode_marked(&rewrite(self.render(&messages, &inputs)?), mark, tokens_max)
    }

    /// Refuses messages whose texts already have too many tokens, before the texts are copied into
    /// a prompt. Counting takes time, so it is skipped if the texts have at most
    /// [`BYTES_PER_TOKEN`] bytes per allowed token.
    fn check_length(&self, messages: &[Message], inputs: &TemplateInputs, tokens_max: usize) -> Result<(), TextError> {
        let texts = messages.iter().flat_map(Message::texts);
        let tools: Vec<String> = inputs.tools.iter().flatten().map(serde_json::Value::to_string).collect();
        let texts: Vec<&str> = texts.chain(tools.iter().map(String::as_str)).collect();
        let bytes: usize = texts.iter().map(|text| text.len()).sum();
        if bytes / BYTES_PER_TOKEN <= tokens_max {
            return Ok(());
        }
        let mut left = tokens_max;
        for text in texts {
            let ids = self.tokenizer.encode_plain_up_to(text, left).map_err(|error| error.up_to(tokens_max))?;
            // When texts are joined, the tokens on both sides of a boundary may merge into one.
            left -= ids.len().saturating_sub(1);
        }
        Ok(())
    }

    fn render(&self, messages: &[Message], inputs: &TemplateInputs) -> Result<String, TextError> {
        match &self.placeholders {
            None => self.template.render(messages, inputs),
            Some(texts) => {
                let written: Vec<_> = messages.iter().map(|message| texts.write(message)).collect();
                self.template.render(&written, inputs)
            }
        }
    }

    /// Returns `true` if the text contains the name of a special token, or ends with the beginning
    /// of one, before or after normalization. The normalizer may turn full-width letters into the
    /// ASCII of such a name.
    fn is_suspect(&self, text: &str) -> bool {
        let guard = &self.guard;
        guard.finds(text) || guard.finds(&self.tokenizer.normalized(text))
    }

    /// Finds added tokens as the tokenizers library does (the earliest match, and the longest of
    /// several at the same position), removes the marks from the text between them, and encodes
    /// this text as plain text. The `lstrip` and `rstrip` settings of added tokens are ignored.
    fn encode_marked(&self, rendered: &str, mark: char, tokens_max: usize) -> Result<Vec<u32>, TextError> {
        let mut ids = Vec::new();
        let mut rest = rendered;
        while !rest.is_empty() {
            let (place, id) = match self.tokenizer.first_added(rest) {
                Some((place, id)) => (place, Some(id)),
                None => (rest.len()..rest.len(), None),
            };
            if place.start > 0 {
                let (plain, left) = (rest[..place.start].replace(mark, ""), tokens_max.saturating_sub(ids.len()));
                let plain = self.tokenizer.encode_plain_up_to(&plain, left);
                ids.extend(plain.map_err(|error| error.up_to(tokens_max))?);
            }
            ids.extend(id);
            rest = &rest[place.end..];
        }
        if ids.len() > tokens_max { Err(TextError::TooManyTokens { limit: tokens_max }) } else { Ok(ids) }
    }
}

/// Every text in the prompt that comes neither from this crate nor from the checkpoint.
fn written_texts<'a>(messages: &'a [Message], inputs: &'a TemplateInputs) -> Vec<&'a str> {
    let mut texts: Vec<_> = messages.iter().flat_map(Message::texts).collect();
    texts.extend(messages.iter().flat_map(Message::reasoning));
    texts.extend(messages.iter().filter_map(Message::result_of));
    let calls = messages.iter().flat_map(Message::tool_calls);
    let values = inputs.tools.iter().flatten().chain(inputs.variables.values()).chain(calls);
    values.for_each(|value| collect_json(value, &mut texts));
    texts
}

fn mark_json(value: &mut serde_json::Value, guard: &SpecialGuard, mark: char) {
    match value {
        serde_json::Value::String(text) => *text = guard.mark(text, mark),
        serde_json::Value::Array(items) => items.iter_mut().for_each(|item| mark_json(item, guard, mark)),
        serde_json::Value::Object(map) => {
            let entries = std::mem::take(map).into_iter().map(|(key, mut value)| {
                mark_json(&mut value, guard, mark);
                (guard.mark(&key, mark), value)
            });
            *map = entries.collect();
        }
        _ => {}
    }
}

fn marked_message(message: &Message, guard: &SpecialGuard, mark: char) -> Message {
    let content = message.content.iter().map(|part| match part {
        ContentPart::Text(text) => ContentPart::Text(guard.mark(text, mark)),
        ContentPart::Reasoning(text) => ContentPart::Reasoning(guard.mark(text, mark)),
        ContentPart::ResultOf(id) => ContentPart::ResultOf(guard.mark(id, mark)),
        ContentPart::ToolCall(call) => {
            let mut call = call.clone();
            mark_json(&mut call, guard, mark);
            ContentPart::ToolCall(call)
        }
        place @ (ContentPart::Image | ContentPart::Video) => place.clone(),
    });
    Message { role: message.role, content: content.collect() }
}
