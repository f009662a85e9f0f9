//! Splitting of long texts into pieces that are encoded separately, so that encoding takes bounded
//! memory and can stop early.
//!
//! The tokenizers library takes more than 100 bytes of memory per byte of text. A piece ends at a
//! *seam*: before a separator that is between two letters or digits, for example before the blank
//! in "one two". The character before a blank may also be any other character except white space.
//! All regular expressions with which byte-level tokenizers split text end a match at a seam, and
//! no merge joins two matches. A SentencePiece vocabulary has no token with a blank between two
//! letters, so no token spans a seam at a blank either.

use std::collections::HashMap;

use tokenizers::{PreTokenizerWrapper, Tokenizer};

/// Approximate size of a piece in bytes.
pub(super) const PIECE_BYTES: usize = 16 << 10;
/// Size in bytes up to which a text is encoded as a whole if its tokenizer has no known seams.
const WHOLE_BYTES: usize = 1 << 20;
/// Size at which text without seams is cut, as a multiple of the usual size of a piece.
const SEAMLESS_PIECES: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seams {
    /// At blanks and punctuation.
    Separators,
    /// At blanks. The tokenizer puts a blank before every text, which replaces the
    /// blank at the seam.
    BlanksReplaced,
    /// At blanks. The tokenizer adds no blank.
    Blanks,
    None,
}

/// The characters that may follow a letter or digit at a seam. An apostrophe is not a separator,
/// because "it's" is one match for some tokenizers. An underscore is not a separator either,
/// because names of special tokens contain it.
const SEPARATORS: &str = " ,;:\"(<>/-=.|&，。、；：（";

/// The spelling of a blank in SentencePiece vocabularies.
const BLANK: char = '▁';

impl Seams {
    /// Finds the seams at which a tokenizer's texts can be cut: the first candidate for which the
    /// pieces of sample texts have the same tokens as the whole texts. `added` has each added
    /// token, with `true` if the token strips the blank after it. No seam may cut an added token.
    /// No seam may separate an added token from the blank that it strips.
    pub(super) fn of(inner: &Tokenizer, vocabulary: &HashMap<String, u32>, added: &[(&str, bool)]) -> Self {
        let separated: String =
            SEPARATORS.chars().flat_map(|separator| ['a', separator, 'B', separator, '7']).collect();
        let samples =
            [&separated, "The quick 12 foxes\nran 345 miles,  as of 2024.", "das ist gut", "世界，你好。再见"];
        let candidates: &[Seams] = match inner.get_pre_tokenizer() {
            Some(pre_tokenizer) if is_byte_level(pre_tokenizer) => &[Seams::Separators],
            _ if vocabulary.keys().any(|token| spans_seam(token)) => &[],
            _ => &[Seams::Blanks, Seams::BlanksReplaced],
        };
        candidates
            .iter()
            .copied()
            .filter(|seams| added.iter().all(|(content, strips)| seams.is_whole(content, *strips)))
            .find(|seams| samples.iter().all(|sample| seams.keeps(inner, sample)))
            .unwrap_or(Seams::None)
    }

    /// Whether the pieces of `sample`, cut as short as possible, have the same tokens as all of
    /// `sample`.
    fn keeps(self, inner: &Tokenizer, sample: &str) -> bool {
        let ids = |text: &str| Some(inner.encode_fast(text, false).ok()?.get_ids().to_vec());
        let pieces = Pieces { rest: sample, seams: self, bytes: 1, bytes_max: usize::MAX, moved: |at, _: &str| at };
        let pieces: Option<Vec<_>> = pieces.map(ids).collect();
        pieces.is_some_and(|pieces| Some(pieces.concat()) == ids(sample))
    }

    /// Whether `content` has no seam inside, and no seam at its end if the token strips the blank
    /// after it.
    fn is_whole(self, content: &str, strips: bool) -> bool {
        let longer = format!("{content} a");
        (1..content.len() + usize::from(strips)).all(|at| !self.is_at(&longer, at))
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
        match self {
            Seams::None => false,
            // A blank begins a match after any character.
            _ if separator == ' ' => !last.is_whitespace() && last != BLANK && next.is_alphanumeric(),
            Seams::Separators => SEPARATORS.contains(separator) && is_plain(last) && is_plain(next),
            Seams::Blanks | Seams::BlanksReplaced => false,
        }
    }

    /// The pieces of `text`, of about `bytes` bytes each. `moved` adjusts a cut that is
    /// not at a seam.
    pub(super) fn pieces<F: Fn(usize, &str) -> usize>(self, text: &str, bytes: usize, moved: F) -> Pieces<'_, F> {
        // For a tokenizer without seams, texts stay whole up to a size for which memory suffices.
        let least = if self == Seams::None { WHOLE_BYTES } else { bytes };
        Pieces {
            rest: text,
            seams: self,
            bytes: least,
            bytes_max: least.max(bytes.saturating_mul(SEAMLESS_PIECES)),
            moved,
        }
    }
}

/// Whether the pre-tokenizer splits text by a regular expression and maps bytes to characters, as
/// GPT-2's does.
fn is_byte_level(pre_tokenizer: &PreTokenizerWrapper) -> bool {
    match pre_tokenizer {
        PreTokenizerWrapper::ByteLevel(_) => true,
        PreTokenizerWrapper::Sequence(parts) => parts.as_ref().iter().any(is_byte_level),
        _ => false,
    }
}

/// Whether a SentencePiece token may have a seam inside: a blank, spelled `▁`, after another
/// character, and at the end of the token or before a letter or digit. Gemma's `>▁</` has no seam.
fn spans_seam(token: &str) -> bool {
    token.char_indices().filter(|(_, character)| *character == BLANK).any(|(at, blank)| {
        let next = token[at + blank.len_utf8()..].chars().next();
        at > 0 && !token[..at].ends_with(BLANK) && next.is_none_or(char::is_alphanumeric)
    })
}

/// Whether `letter` is a letter or digit of a script whose letters are single characters.
fn is_plain(letter: char) -> bool {
    const LETTERS: [(char, char); 7] = [
        ('\u{c0}', '\u{24f}'),
        ('\u{386}', '\u{3ff}'),
        ('\u{400}', '\u{481}'),
        ('\u{3041}', '\u{3096}'),
        ('\u{30a1}', '\u{30fa}'),
        ('\u{4e00}', '\u{9fff}'),
        ('\u{ac00}', '\u{d7a3}'),
    ];
    letter.is_ascii_alphanumeric()
        || letter.is_alphabetic() && LETTERS.iter().any(|(first, last)| (*first..=*last).contains(&letter))
}

pub(super) struct Pieces<'a, F> {
    rest: &'a str,
    seams: Seams,
    bytes: usize,
    /// Size in bytes at which a text without seams is cut.
    bytes_max: usize,
    /// Moves a cut that would split an added token to a position before that token.
    moved: F,
}

impl<'a, F: Fn(usize, &str) -> usize> Iterator for Pieces<'a, F> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        if self.rest.is_empty() {
            return None;
        }
        let (bytes_max, end) = (self.bytes_max, self.rest.len());
        let seam = |at: &usize| self.seams.is_at(self.rest, *at);
        let at = if end <= self.bytes {
            end
        } else {
            (self.bytes..end.min(bytes_max)).find(seam).unwrap_or_else(|| {
                if end <= bytes_max {
                    end
                } else {
                    (self.moved)(
                        (0..=bytes_max).rev().find(|at| self.rest.is_char_boundary(*at)).unwrap_or(end),
                        self.rest,
                    )
                }
            })
        };
        let piece = &self.rest[..at];
        self.rest = &self.rest[at..];
        if self.seams == Seams::BlanksReplaced {
            self.rest = self.rest.strip_prefix(' ').unwrap_or(self.rest);
        }
        Some(piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_spans_a_seam_if_a_word_may_begin_after_its_blank() {
        for token in ["a▁", "a▁b", "▁a▁b", ">▁7", "▁▁a▁"] {
            assert!(spans_seam(token), "{token}");
        }
        for token in [">▁</", "▁", "▁▁▁", "▁the", "the", "", "▁>▁</", "a▁▁"] {
            assert!(!spans_seam(token), "{token}");
        }
    }

    #[test]
    fn a_literal_blank_sign_is_no_seam() {
        assert!(Seams::Blanks.is_at("one two", 3));
        assert!(!Seams::Blanks.is_at("▁ two", '▁'.len_utf8()));
    }
}
