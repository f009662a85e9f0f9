//! The detokenizer, which turns token ids, one at a time, into text in whole characters.

use super::error::TextError;
use super::tokenizer::Tokenizer;

/// Tokens kept as context for the next tokens, because decoders look back (for a leading space
/// or a word's continuation).
const CONTEXT_TOKENS: usize = 8;
/// Tokens after which the context is shortened, so that each token of a long reply costs the same.
const WINDOW_TOKENS: usize = 32;
/// Maximum number of U+FFFD characters that are withheld. An unfinished UTF-8 character has at most
/// three bytes, and a decoder may show each byte as U+FFFD.
const UNFINISHED_MAX: usize = 3;

/// Turns one reply's tokens into text as they arrive.
///
/// The concatenated pieces equal [`Tokenizer::decode`] of all tokens, except for runs of byte
/// tokens (`<0xE4>`) that are not valid UTF-8. `decode` turns each byte of such a run into U+FFFD.
/// The detokenizer has already returned the valid characters of the run and keeps them. A trailing U+FFFD is withheld until it can no longer be the beginning of a character.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special_tokens: bool,
    /// Ids of special tokens that yield text although special tokens are skipped.
    kept: Vec<u32>,
    window: Vec<u32>,
    emitted_bytes: usize,
    /// Bytes of a character that the next byte tokens may complete. At most three.
    unfinished: Vec<u8>,
}

impl Detokenizer {
    /// A detokenizer for a new reply. With `skip_special_tokens`, control tokens yield no text.
    pub fn new(tokenizer: Tokenizer, skip_special_tokens: bool) -> Self {
        let (kept, window, unfinished) = (Vec::new(), Vec::new(), Vec::new());
        Detokenizer { tokenizer, skip_special_tokens, kept, window, emitted_bytes: 0, unfinished }
    }

    /// Makes special tokens yield their text if they are tags that a
    /// [`ReplyParser`](super::ReplyParser) has to see. Tags that are not tokens are spelled by
    /// several text tokens and need no exception.
    #[must_use]
    pub fn keeping(mut self, tags: impl IntoIterator<Item = &'static str>) -> Self {
        let tokenizer = &self.tokenizer;
        self.kept.extend(tags.into_iter().filter_map(|tag| tokenizer.id_of(tag)));
        self
    }

    /// Returns the text that `token` completes, which is empty while a character is unfinished.
    ///
    /// # Errors
    /// [`TextError::Decode`].
    pub fn feed(&mut self, token: u32) -> Result<String, TextError> {
        if self.skip_special_tokens && self.tokenizer.is_special(token) && !self.kept.contains(&token) {
            return Ok(String::new());
        }
        // ASCII bytes are whole characters, so they are decoded like other tokens.
        let byte = self.tokenizer.byte_token(token).filter(|byte| !byte.value.is_ascii());
        // The window has an ASCII placeholder in place of any other byte token. The placeholder always
        // decodes to one character, so an incomplete character cannot change the surrounding text.
        self.window.push(byte.map_or(token, |byte| byte.ascii));
        let text = self.tokenizer.decode(&self.window, false)?;
        let piece = match byte {
            Some(byte) => {
                let before = self.take(&text, text.len() - 1);
                self.emitted_bytes = text.len();
                before + &self.push_byte(byte.value)
            }
            None => self.replace_unfinished() + &self.take(&text, safe_bytes(&text)),
        };
        if self.window.len() >= WINDOW_TOKENS {
            self.shorten(text.len() - self.emitted_bytes.min(text.len()))?;
        }
        Ok(piece)
    }

    /// Returns the withheld text, in which an unfinished character becomes U+FFFD, and resets the
    /// detokenizer for another reply.
    ///
    /// # Errors
    /// [`TextError::Decode`].
    pub fn flush(&mut self) -> Result<String, TextError> {
        let text = self.tokenizer.decode(&self.window, false)?;
        let piece = self.take(&text, text.len()) + &self.replace_unfinished();
        self.window.clear();
        self.emitted_bytes = 0;
        Ok(piece)
    }

    /// Adds a byte to a run of byte tokens. Returns the characters that it completes, and U+FFFD
    /// for each byte that belongs to no character.
    fn push_byte(&mut self, byte: u8) -> String {
        self.unfinished.push(byte);
        let mut text = String::new();
        loop {
            match str::from_utf8(&self.unfinished) {
                Ok(valid) => {
                    text.push_str(valid);
                    self.unfinished.clear();
                    return text;
                }
                Err(error) if error.error_len().is_none() => return text,
                // The first byte cannot begin a character with the bytes that follow it.
                Err(_) => {
                    text.push(char::REPLACEMENT_CHARACTER);
                    self.unfinished.remove(0);
                }
            }
        }
    }

    /// U+FFFD for each byte of a character that was not completed.
    fn replace_unfinished(&mut self) -> String {
        self.unfinished.drain(..).map(|_| char::REPLACEMENT_CHARACTER).collect()
    }

    fn take(&mut self, text: &str, until: usize) -> String {
        // If a decoder rewrites earlier text (no known decoder does), `get` returns `None` and the
        // piece is empty. Slicing would panic.
        let piece = text.get(self.emitted_bytes..until).unwrap_or("").to_owned();
        self.emitted_bytes = self.emitted_bytes.max(until);
        piece
    }

    /// Drops all but the last tokens. The text of the remaining tokens was emitted, except for
    /// the last `withheld_bytes` bytes.
    fn shorten(&mut self, withheld_bytes: usize) -> Result<(), TextError> {
        let context = &self.window[self.window.len() - CONTEXT_TOKENS..];
        let text = self.tokenizer.decode(context, false)?;
        if let Some(emitted) = text.len().checked_sub(withheld_bytes).filter(|&at| text.is_char_boundary(at)) {
            self.window.drain(..self.window.len() - CONTEXT_TOKENS);
            self.emitted_bytes = emitted;
        }
        Ok(())
    }
}

/// Bytes of `text` that later tokens cannot change.
fn safe_bytes(text: &str) -> usize {
    let unfinished = text.chars().rev().take(UNFINISHED_MAX).take_while(|&char| char == char::REPLACEMENT_CHARACTER);
    text.len() - unfinished.map(char::len_utf8).sum::<usize>()
}
