//! Prefix keys: hashes over everything that determines the content of a block of keys and values.

use std::{fmt, ops::Range, sync::Arc};

use bursar_kernels::BLOCK_TOKENS;

use super::{CacheFormat, POSITION_AXES, PictureHash};

/// The hash of a full block and of everything before that block in its sequence. Equal hashes mean
/// equal keys and values. The hash is BLAKE3 for the same reason as [`PictureHash`]: an attacker
/// with a collision could read another user's prompt.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PrefixKey([u8; 32]);

impl fmt::Debug for PrefixKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(formatter, "PrefixKey({a:02x}{b:02x}{c:02x}{d:02x}..)")
    }
}

impl PrefixKey {
    /// The first eight bytes of the hash as a number, for routers that identify blocks by number.
    pub fn number(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }
}

/// A picture among the tokens of a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContentSpan {
    /// The range of the picture's placeholder tokens.
    pub tokens: Range<usize>,
    /// The hash of the pixels and the image processor's settings.
    pub hash: PictureHash,
}

/// The keys of a sequence's full blocks, in order. Each key also covers the key before it.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct PrefixKeys {
    salt: Option<PrefixKey>,
    /// The salt as the caller gave it.
    salt_text: Option<Arc<str>>,
    keys: Vec<PrefixKey>,
}

/// Omits the salt, which is a user's secret.
impl fmt::Debug for PrefixKeys {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("PrefixKeys").field("keys", &self.keys).finish_non_exhaustive()
    }
}

impl PrefixKeys {
    /// Keys for a KV cache of format `cache`, with an optional salt (see [`salted`](Self::salted)).
    /// Keys of different formats differ, because their blocks contain different numbers.
    pub fn of(cache: CacheFormat, salt: Option<&str>) -> Self {
        let keys = match (cache, salt) {
            (CacheFormat::Plain, None) => PrefixKeys::default(),
            (CacheFormat::Plain, Some(salt)) => PrefixKeys::salted(salt.as_bytes()),
            (cache, salt) => {
                let content = [&[u8::from(salt.is_some())][..], salt.unwrap_or_default().as_bytes()].concat();
                let context = format!("bursar: keys and values in {}", cache.name());
                let salt = Some(PrefixKey(blake3::derive_key(&context, &content)));
                PrefixKeys { salt, ..PrefixKeys::default() }
            }
        };
        PrefixKeys { salt_text: salt.map(Arc::from), ..keys }
    }

    /// Keys that are shared only by sequences with the same salt. A user who does not know the salt
    /// cannot learn from the response time whether another user sent the same prompt.
    pub fn salted(salt: &[u8]) -> Self {
        PrefixKeys { salt: Some(PrefixKey(*blake3::hash(salt).as_bytes())), ..PrefixKeys::default() }
    }

    /// The salt that [`of`](Self::of) was given.
    pub fn salt(&self) -> Option<&Arc<str>> {
        self.salt_text.as_ref()
    }

    /// Adds keys for the blocks that have become full. The arguments describe the whole sequence:
    /// one position per token, and pictures in the order of their tokens. The tokens that already
    /// have keys must not have changed.
    pub fn extend(&mut self, tokens: &[u32], positions: &[[u32; POSITION_AXES]], pictures: &[ContentSpan]) {
        assert_eq!(tokens.len(), positions.len(), "each token has a position");
        for block in self.keys.len()..tokens.len() / BLOCK_TOKENS {
            let range = block * BLOCK_TOKENS..(block + 1) * BLOCK_TOKENS;
            let mut content = Vec::with_capacity(512);
            content.extend(self.keys.last().or(self.salt.as_ref()).iter().flat_map(|before| before.0));
            content.extend(tokens[range.clone()].iter().flat_map(|token| token.to_le_bytes()));
            content.extend(positions[range.clone()].iter().flatten().flat_map(|axis| axis.to_le_bytes()));
            let shown = pictures.iter().filter(|p| p.tokens.start < range.end && p.tokens.end > range.start);
            for picture in shown {
                content.extend((picture.tokens.start as u64).to_le_bytes());
                content.extend((picture.tokens.len() as u64).to_le_bytes());
                content.extend(picture.hash.0);
            }
            self.keys.push(PrefixKey(*blake3::hash(&content).as_bytes()));
        }
    }

    /// One key per full block.
    pub fn as_slice(&self) -> &[PrefixKey] {
        &self.keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(tokens: &[u32], first_position: u32, pictures: &[ContentSpan]) -> Vec<PrefixKey> {
        let positions: Vec<_> = (first_position..).take(tokens.len()).map(|position| [position; 3]).collect();
        let mut keys = PrefixKeys::default();
        keys.extend(tokens, &positions, pictures);
        keys.as_slice().to_vec()
    }

    fn picture(tokens: Range<usize>, name: u8) -> ContentSpan {
        ContentSpan { tokens, hash: PictureHash([name; 32]) }
    }

    #[test]
    fn equal_beginnings_have_equal_keys_and_a_begun_block_has_none() {
        let long: Vec<u32> = (0..50).collect();
        let mut other = long.clone();
        other[33] = 7;
        let (long, other) = (keys(&long, 0, &[]), keys(&other, 0, &[]));
        assert_eq!(long.len(), 3, "two tokens do not fill a block");
        assert_eq!(long[..2], other[..2]);
        assert_ne!(long[2], other[2]);
    }

    #[test]
    fn a_salt_is_in_every_key() {
        let (tokens, positions) = ([1; 32], [[0; 3]; 32]);
        let keys = [PrefixKeys::default(), PrefixKeys::salted(b"one"), PrefixKeys::salted(b"other")].map(|mut keys| {
            keys.extend(&tokens, &positions, &[]);
            keys.as_slice().to_vec()
        });
        let [unsalted, one, other] = keys;
        assert_eq!((unsalted.len(), one.len(), other.len()), (2, 2, 2));
        for ((unsalted, one), other) in unsalted.iter().zip(&one).zip(&other) {
            assert!(unsalted != one && one != other && unsalted != other);
        }
    }

    #[test]
    fn a_cache_of_another_format_has_other_keys_with_and_without_a_salt() {
        let (tokens, positions) = ([1; 32], [[0; 3]; 32]);
        let mut all = std::collections::BTreeSet::new();
        for cache in [CacheFormat::Plain, CacheFormat::Fp8] {
            for salt in [None, Some(""), Some("one")] {
                let mut keys = PrefixKeys::of(cache, salt);
                keys.extend(&tokens, &positions, &[]);
                all.extend(keys.as_slice().iter().copied());
            }
        }
        assert_eq!(all.len(), 12);
    }

    #[test]
    fn a_difference_goes_on_to_all_that_follows() {
        let (mut one, mut other) = (vec![1; 64], vec![1; 64]);
        (one[0], other[0]) = (2, 3);
        let (one, other) = (keys(&one, 0, &[]), keys(&other, 0, &[]));
        assert!(one.iter().zip(&other).all(|(one, other)| one != other));
    }

    #[test]
    fn tokens_of_other_pictures_places_or_positions_are_other_content() {
        let tokens = [9; 32];
        let plain = keys(&tokens, 0, &[picture(4..24, 1)]);
        assert_ne!(plain[0], keys(&tokens, 0, &[picture(4..24, 2)])[0], "another picture changes the key");
        assert_ne!(
            plain[0],
            keys(&tokens, 0, &[picture(5..25, 1)])[0],
            "a picture that begins one token later changes the key"
        );
        assert_ne!(plain[0], keys(&tokens, 1, &[picture(4..24, 1)])[0], "other positions change the key");
        assert_ne!(plain[0], keys(&tokens, 0, &[])[0], "typed placeholder tokens without a picture change the key");
        assert_ne!(
            plain[0],
            keys(&tokens, 0, &[picture(4..14, 1), picture(14..24, 1)])[0],
            "the same picture shown twice changes the key"
        );
    }

    #[test]
    fn a_picture_after_a_block_is_no_part_of_it() {
        let tokens = [9; 48];
        let (plain, shown) = (keys(&tokens, 0, &[]), keys(&tokens, 0, &[picture(16..24, 1)]));
        assert_eq!(shown[0], plain[0], "the picture begins where the block ends");
        assert!(shown[1] != plain[1] && shown[2] != plain[2]);
    }

    #[test]
    fn a_key_that_is_printed_shows_its_first_four_bytes() {
        let key = PrefixKey(std::array::from_fn(|index| 0xa0 + index as u8));
        assert_eq!(format!("{key:?}"), "PrefixKey(a0a1a2a3..)");
        assert_eq!(key.number(), 0xa7a6_a5a4_a3a2_a1a0);
    }

    #[test]
    fn keys_that_are_printed_do_not_show_their_salt() {
        let keys = PrefixKeys::of(CacheFormat::Plain, Some("a secret"));
        assert_eq!(keys.salt().map(|salt| &**salt), Some("a secret"));
        assert!(!format!("{keys:?}").contains("secret"));
    }

    #[test]
    fn keys_that_grow_token_by_token_are_those_made_at_once() {
        let tokens: Vec<u32> = (100..180).collect();
        let positions: Vec<_> = (0..80).map(|position| [position; 3]).collect();
        let pictures = [picture(10..40, 1)];
        let mut grown = PrefixKeys::default();
        for length in 0..=tokens.len() {
            grown.extend(&tokens[..length], &positions[..length], &pictures);
        }
        assert_eq!(grown.as_slice(), keys(&tokens, 0, &pictures));
    }
}
