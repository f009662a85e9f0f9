//! Long texts in pieces that are encoded separately, so that encoding one takes bounded memory
//! and can stop early.
//!
//! The tokenizers library takes more than 100 bytes of memory per byte of text. A piece ends at a
//! *seam*: between a letter or digit and a separator that is followed by one, for example before
//! the blank in "one two". Every regular expression that byte-level tokenizers split text with ends
//! a match there, and no merge crosses two matches. A SentencePiece vocabulary has no token with a
//! blank after a letter, so none crosses a blank there either.

use std::collections::HashMap;

use tokenizers::{PreTokenizerWrapper, Tokenizer};

/// Bytes of a piece, about.
pub(super) const PIECE_BYTES: usize = 16 << 10;
/// Bytes of a text that is encoded as a whole where nothing is known of seams.
const WHOLE_BYTES: usize = 1 << 20;
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

/// What may follow a letter or a digit at a seam. An apostrophe may not, because "it's" is one
/// match for some tokenizers, nor an underscore, which names of special tokens have.
const SEPARATORS: &str = " ,;:\"(<>/-=.|&，。、；：（";

impl Seams {
    /// How the texts of a tokenizer can be cut: the first way in which pieces of samples have the
    /// tokens of the whole. No seam may cut one of the tokens `added`, nor take the blank after one
    /// that strips it, as the second of each says.
    pub(super) fn of(inner: &Tokenizer, vocabulary: &HashMap<String, u32>, added: &[(&str, bool)]) -> Self {
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
            .filter(|seams| added.iter().all(|(content, strips)| seams.is_whole(content, *strips)))
            .find(|seams| samples.iter().all(|sample| seams.keeps(inner, sample)))
            .unwrap_or(Seams::None)
    }

    /// Whether the pieces of `sample`, as short as they can be, have its tokens.
    fn keeps(self, inner: &Tokenizer, sample: &str) -> bool {
        let ids = |text: &str| Some(inner.encode_fast(text, false).ok()?.get_ids().to_vec());
        let pieces = Pieces { rest: sample, seams: self, bytes: 1, bytes_max: usize::MAX, moved: |at, _: &str| at };
        let pieces: Option<Vec<_>> = pieces.map(ids).collect();
        pieces.is_some_and(|pieces| Some(pieces.concat()) == ids(sample))
    }

    /// Whether no seam is in `content`, or at its end if it strips what follows.
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
            // Whatever comes before it, a blank begins a match.
            _ if separator == ' ' => !last.is_whitespace() && next.is_alphanumeric(),
            Seams::Separators => SEPARATORS.contains(separator) && is_plain(last) && is_plain(next),
            Seams::Blanks | Seams::BlanksReplaced => false,
        }
    }

    /// The pieces of `text`, of about `bytes` each.
    /// A cut without a seam is `moved`.
    pub(super) fn pieces<F: Fn(usize, &str) -> usize>(self, text: &str, bytes: usize, moved: F) -> Pieces<'_, F> {
        // A tokenizer without seams has its texts whole, up to a size whose memory can be had.
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

/// A letter or digit of a script whose letters are single characters.
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

/// The pieces of a text.
pub(super) struct Pieces<'a, F> {
    rest: &'a str,
    seams: Seams,
    bytes: usize,
    /// Where a text without seams is cut.
    bytes_max: usize,
    /// Where a cut at this place goes, before a token that it would split.
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
