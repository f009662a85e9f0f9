//! Long texts in pieces that are encoded separately, so that encoding one takes bounded memory and can stop early.
//!
//! The tokenizers library takes more than 100 bytes of memory per byte of text. A piece ends at a *seam*: between a
//! letter or digit and a separator that is followed by one, for example before the blank in "one two". Every regular
//! expression that byte-level tokenizers split text with ends a match there, and no merge crosses two matches. A
//! SentencePiece vocabulary has no token with a blank after a letter, so none crosses a blank there either.

use std::collections::HashMap;

use tokenizers::{PreTokenizerWrapper, Tokenizer};

/// Bytes of a piece, about.
pub(super) const PIECE_BYTES: usize = 16 << 10;
/// A text without seams is cut after this many pieces' bytes.
const SEAMLESS_PIECES: usize = 4;

/// How a tokenizer's text can be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seams {
    /// At blanks and punctuation.
    Separators,
    /// At blanks. The tokenizer puts a blank before every text, which replaces the one at the seam.
    BlanksReplaced,
    /// At blanks.
    Blanks,
    /// Nowhere.
    None,
}

/// What may follow a letter or a digit at a seam. An apostrophe may not, because "it's" is one match for some tokenizers,
/// nor an underscore, which names of special tokens have.
const SEPARATORS: &str = " ,;:\"(<>/-=.|&，。、；：（";

impl Seams {
    /// How the texts of a tokenizer can be cut: the first way in which pieces of samples have the tokens of the whole.
    /// No seam may cut one of the tokens `added`.
    pub(super) fn of(inner: &Tokenizer, vocabulary: &HashMap<String, u32>, added: &[&str]) -> Self {
        let separated: String =
            SEPARATORS.chars().flat_map(|separator| ['a', separator, 'B', separator, '7']).collect();
        let samples =
            [&separated, "The quick 12 foxes\nran 345 miles,  as of 2024.", "das ist gut", "世界，你好。再见"];
        let candidates: &[Seams] = match inner.get_pre_tokenizer() {
            Some(pre_tokenizer) if is_byte_level(pre_tokenizer) => &[Seams::Separators],
            _ if vocabulary.keys().any(|token| has_inner_blank(token)) => &[],
            _ => &[Seams::Blanks, Seams::BlanksReplaced],
        };
        candidates
            .iter()
            .copied()
            .filter(|seams| added.iter().all(|content| seams.is_whole(content)))
            .find(|seams| samples.iter().all(|sample| seams.keeps(inner, sample)))
            .unwrap_or(Seams::None)
    }

    /// Whether the pieces of `sample`, as short as they can be, have its tokens.
    fn keeps(self, inner: &Tokenizer, sample: &str) -> bool {
        let ids = |text: &str| Some(inner.encode_fast(text, false).ok()?.get_ids().to_vec());
        let pieces = Pieces { rest: sample, seams: self, bytes: 1, bytes_max: usize::MAX };
        let pieces: Option<Vec<_>> = pieces.map(ids).collect();
        pieces.is_some_and(|pieces| Some(pieces.concat()) == ids(sample))
    }

    /// Whether no seam is in `content` or at its end.
    fn is_whole(self, content: &str) -> bool {
        let longer = format!("{content} a");
        (1..=content.len()).all(|at| !self.is_at(&longer, at))
    }

    fn is_at(self, text: &str, at: usize) -> bool {
        if !text.is_char_boundary(at) {
            return false;
        }
        let mut after = text[at..].chars();
        let (Some(last), Some(separator), Some(next)) = (text[..at].chars().next_back(), after.next(), after.next())
        else {
            return false;
        };
        let separates = match self {
            Seams::Separators => SEPARATORS.contains(separator),
            Seams::Blanks | Seams::BlanksReplaced => separator == ' ',
            Seams::None => false,
        };
        separates && is_plain(last) && is_plain(next)
    }

    /// The pieces of `text`, of about `bytes` each.
    pub(super) fn pieces(self, text: &str, bytes: usize) -> Pieces<'_> {
        Pieces { rest: text, seams: self, bytes, bytes_max: bytes.saturating_mul(SEAMLESS_PIECES) }
    }
}

/// Whether it splits by a regular expression and spells bytes, as GPT-2's does.
fn is_byte_level(pre_tokenizer: &PreTokenizerWrapper) -> bool {
    match pre_tokenizer {
        PreTokenizerWrapper::ByteLevel(_) => true,
        PreTokenizerWrapper::Sequence(parts) => parts.as_ref().iter().any(is_byte_level),
        _ => false,
    }
}

/// Whether a token of SentencePiece has a blank, which it spells as `▁`, after something else.
fn has_inner_blank(token: &str) -> bool {
    token.trim_start_matches('▁').contains('▁')
}

/// A letter or digit that no neighbour changes, whatever the normalizer.
fn is_plain(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || ('\u{4e00}'..='\u{9fff}').contains(&letter)
}

/// The pieces of a text.
pub(super) struct Pieces<'a> {
    rest: &'a str,
    seams: Seams,
    bytes: usize,
    /// Where a text without seams is cut.
    bytes_max: usize,
}

impl<'a> Iterator for Pieces<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        if self.rest.is_empty() {
            return None;
        }
        let (bytes_max, end) = (self.bytes_max, self.rest.len());
        let seam = |at: &usize| self.seams.is_at(self.rest, *at);
        let at = match self.seams {
            _ if end <= self.bytes => end,
            Seams::None => end,
            _ => (self.bytes..end.min(bytes_max)).find(seam).unwrap_or_else(|| match end <= bytes_max {
                true => end,
                false => (0..=bytes_max).rev().find(|at| self.rest.is_char_boundary(*at)).unwrap_or(end),
            }),
        };
        let piece = &self.rest[..at];
        self.rest = &self.rest[at..];
        if self.seams == Seams::BlanksReplaced {
            self.rest = self.rest.strip_prefix(' ').unwrap_or(self.rest);
        }
        Some(piece)
    }
}
