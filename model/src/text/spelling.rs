//! Spelling: the bytes of text that each token of a vocabulary represents.

use serde_json::Value;
use tokenizers::DecoderWrapper;

use super::error::TextError;

/// The way in which a tokenizer's tokens spell text, read from its decoder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Spelling {
    /// One character per byte (Radford et al. 2019, GPT-2).
    ByteLevel,
    /// Plain text, after the replacements. If `bytes` is true, `<0xE4>` is a single byte (Kudo and
    /// Richardson 2018, arXiv 1808.06226).
    Plain {
        /// Replacements, in order, as (from, to).
        replaced: Vec<(String, String)>,
        /// Whether there are tokens for single bytes.
        bytes: bool,
    },
}

impl Spelling {
    /// The spelling of the vocabulary of a tokenizer with this decoder.
    ///
    /// # Errors
    /// [`TextError::Spelling`] if the tokenizer has no decoder, or its decoder does more than
    /// join tokens (WordPiece, CTC).
    pub fn of(decoder: Option<&DecoderWrapper>) -> Result<Self, TextError> {
        let decoder = decoder.and_then(|decoder| serde_json::to_value(decoder).ok());
        let decoder = decoder.ok_or(TextError::Spelling)?;
        let steps = match decoder["decoders"].as_array() {
            Some(steps) => steps.iter().collect(),
            None => vec![&decoder],
        };
        let (mut replaced, mut bytes) = (Vec::new(), false);
        for step in &steps {
            match step["type"].as_str() {
                Some("ByteLevel") => return Ok(Spelling::ByteLevel),
                Some("ByteFallback") => bytes = true,
                Some("Replace") => replaced.push(replacement(step).ok_or(TextError::Spelling)?),
                Some("Metaspace") => {
                    replaced.push((step["replacement"].as_str().unwrap_or("\u{2581}").to_owned(), " ".to_owned()));
                }
                // These steps act on the whole text: they join tokens and strip a
                // space at the beginning.
                Some("Fuse" | "Strip") => {}
                _ => return Err(TextError::Spelling),
            }
        }
        if replaced.is_empty() && !bytes { Err(TextError::Spelling) } else { Ok(Spelling::Plain { replaced, bytes }) }
    }

    /// The bytes of `token`, given in the vocabulary's spelling.
    pub fn bytes(&self, token: &str) -> Vec<u8> {
        match self {
            // A token with a character that represents no byte is an added token,
            // whose text is plain.
            Spelling::ByteLevel => token.chars().map(byte_of).collect::<Option<_>>().unwrap_or_else(|| token.into()),
            Spelling::Plain { replaced, .. } => match self.byte_of_token(token) {
                Some(byte) => vec![byte],
                None => {
                    let replace = |text: String, (from, to): &(String, String)| text.replace(from, to);
                    replaced.iter().fold(token.to_owned(), replace).into_bytes()
                }
            },
        }
    }

    /// The byte that `token` represents, if it is a token for a single byte, such as `<0xE4>`.
    pub fn byte_of_token(&self, token: &str) -> Option<u8> {
        single_byte(token).filter(|_| matches!(self, Spelling::Plain { bytes: true, .. }))
    }
}

fn replacement(step: &Value) -> Option<(String, String)> {
    let from = step["pattern"]["String"].as_str().filter(|from| !from.is_empty())?;
    Some((from.to_owned(), step["content"].as_str()?.to_owned()))
}

/// Printable Latin-1 characters represent their own code. The characters from U+0100 on represent
/// the other bytes, in order.
fn byte_of(character: char) -> Option<u8> {
    let stands_for_itself = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    match u32::from(character) {
        code @ 0..=0xFF => Some(code as u8).filter(|byte| stands_for_itself(*byte)),
        code => (0..=0xFF).filter(|byte| !stands_for_itself(*byte)).nth((code - 0x100) as usize),
    }
}

fn single_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::Tokenizer;

    #[test]
    fn byte_level_characters_map_to_every_byte_once() {
        let mut bytes: Vec<u8> = (0..0x200).filter_map(char::from_u32).filter_map(byte_of).collect();
        bytes.sort_unstable();
        assert_eq!((0..=255).collect::<Vec<u8>>(), bytes);
        let spelled = Spelling::ByteLevel.bytes("Ġgrö\u{0100}");
        assert_eq!(b" gr\xf6\0".to_vec(), spelled);
        assert_eq!("日本 <x>".as_bytes(), Spelling::ByteLevel.bytes("日本 <x>"));
    }

    #[test]
    fn byte_fallback_tokens_are_bytes_and_other_tokens_are_text() {
        let plain = Spelling::Plain { replaced: vec![("▁".into(), " ".into())], bytes: true };
        assert_eq!(vec![0xE4], plain.bytes("<0xE4>"));
        assert_eq!(b" the".to_vec(), plain.bytes("▁the"));
        assert_eq!(b"<0xE4".to_vec(), plain.bytes("<0xE4"));
    }

    #[test]
    fn a_spelling_is_read_from_the_decoder_of_the_file() {
        let tokenizer = |decoder: &str| {
            let json = format!(
                r#"{{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
                "pre_tokenizer": null, "post_processor": null, "decoder": {decoder},
                "model": {{"type": "BPE", "vocab": {{"a": 0, "<0x41>": 1}}, "merges": []}}}}"#
            );
            Tokenizer::from_bytes(json.as_bytes()).expect("a tokenizer")
        };
        let llama = r#"{"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}"#;
        let expected = Spelling::Plain { replaced: vec![("▁".into(), " ".into())], bytes: true };
        assert_eq!(expected, tokenizer(llama).spelling().expect("a spelling"));
        let metaspace = r#"{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}"#;
        let expected = Spelling::Plain { replaced: vec![("▁".into(), " ".into())], bytes: false };
        assert_eq!(expected, tokenizer(metaspace).spelling().expect("a spelling"));
        let word_piece = r###"{"type": "WordPiece", "prefix": "##", "cleanup": true}"###;
        for unknown in [word_piece, "null", r#"{"type": "Fuse"}"#] {
            assert!(matches!(tokenizer(unknown).spelling(), Err(TextError::Spelling)), "{unknown}");
        }
    }
}
