//! The small files of a checkpoint: configuration, tokenizer and templates.

use std::borrow::Cow;

use serde_json::Value;

use super::checkpoint_source::CheckpointSource;
use super::error::CheckpointError;
use super::layout::{ADDED_TOKENS, OPTIONAL, TOKENIZER, VOCABULARY};

/// The optional files that belong to the tokenizer.
const OF_TOKENIZER: [&str; 3] = ["tokenizer_config.json", "chat_template.jinja", "chat_template.json"];

/// The small files of a checkpoint except `config.json`.
#[derive(Debug)]
pub(super) struct TextFiles {
    place: String,
    files: Vec<(&'static str, Option<Cow<'static, [u8]>>)>,
}

impl TextFiles {
    /// Reads the files that exist. The tokenizer's files are read from `tokenizer` if it is given.
    /// The files that replace `tokenizer.json` are read only if `tokenizer.json` is missing.
    ///
    /// # Errors
    /// See [`CheckpointSource::read`].
    pub(super) fn read(
        source: &CheckpointSource,
        tokenizer: Option<&CheckpointSource>,
    ) -> Result<Self, CheckpointError> {
        let mut names = vec![TOKENIZER];
        names.extend(OPTIONAL);
        let of_tokenizer = tokenizer.unwrap_or(source);
        let read = |name: &'static str| {
            let is_of_checkpoint = OPTIONAL.contains(&name) && !OF_TOKENIZER.contains(&name);
            Ok((name, if is_of_checkpoint { source.read(name)? } else { of_tokenizer.read(name)? }))
        };
        let mut files = names.into_iter().map(read).collect::<Result<Vec<_>, CheckpointError>>()?;
        if files[0].1.is_none() {
            let parts = VOCABULARY.into_iter().chain([ADDED_TOKENS]).map(read);
            files.extend(parts.collect::<Result<Vec<_>, CheckpointError>>()?);
        }
        Ok(TextFiles { place: of_tokenizer.place(), files })
    }

    /// Every file name that was looked up, with its content if the file exists.
    pub(super) fn named(&self) -> impl Iterator<Item = (&str, Option<&[u8]>)> {
        self.files.iter().map(|(name, content)| (*name, content.as_deref()))
    }

    /// The id of an added token, from any file that has it.
    pub(super) fn added_token(&self, content: &str) -> Option<u32> {
        let id = |id: &Value| u32::try_from(id.as_u64()?).ok();
        let by_content = || id(self.json("added_tokens.json")?.get(content)?);
        let by_id = || {
            let settings = self.json("tokenizer_config.json")?;
            let tokens = settings.get("added_tokens_decoder")?.as_object()?;
            tokens.iter().find(|(_, token)| token["content"] == content)?.0.parse().ok()
        };
        let in_list = || {
            let whole = self.json(TOKENIZER)?;
            id(&whole.get("added_tokens")?.as_array()?.iter().find(|token| token["content"] == content)?["id"])
        };
        by_content().or_else(by_id).or_else(in_list)
    }

    /// The text of the tokenizer's end token.
    pub(super) fn end_token(&self) -> Option<String> {
        let settings = self.json("tokenizer_config.json")?;
        let token = settings.get("eos_token")?;
        token.as_str().or_else(|| token.get("content")?.as_str()).map(str::to_owned)
    }

    fn json(&self, name: &str) -> Option<Value> {
        serde_json::from_slice(self.get(name)?).ok()
    }

    /// A file's content, if it exists.
    pub(super) fn get(&self, name: &str) -> Option<&[u8]> {
        self.named().find(|(known, _)| *known == name)?.1
    }

    /// The content of a file that replaces `tokenizer.json`. If the file is missing, the error
    /// names `tokenizer.json`, which users know.
    ///
    /// # Errors
    /// [`CheckpointError::MissingFile`].
    pub(super) fn require(&self, part: &str) -> Result<&[u8], CheckpointError> {
        let missing = || CheckpointError::MissingFile { place: self.place.clone(), file: TOKENIZER.into() };
        self.get(part).ok_or_else(missing)
    }
}
