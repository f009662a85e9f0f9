//! A byte-level tokenizer of any size, made by counting: for checkpoints that have the shape of a model and not its
//! vocabulary. It takes as long to load and to decode as a real one of its size, and spells any text.

use serde_json::{Map, Value, json};

/// Bytes, each of which is a token.
const BYTES: usize = 256;

/// A `tokenizer.json` of `words` tokens that are text (256 bytes at least, then pairs and triples of printable ASCII
/// characters, each a merge), and of `control` tokens behind them.
pub fn tokenizer(words: usize, control: &[&str]) -> Vec<u8> {
    let letters: Vec<char> = (b' '..=b'~').map(spelling).collect();
    let pairs: Vec<String> = letters.iter().flat_map(|a| letters.iter().map(move |b| format!("{a}{b}"))).collect();
    let of_two = letters.iter().flat_map(|a| letters.iter().map(|b| (a.to_string(), *b)));
    let of_three = pairs.iter().flat_map(|pair| letters.iter().map(|letter| (pair.clone(), *letter)));
    let mut vocabulary: Map<String, Value> =
        (0..=u8::MAX).map(|byte| (spelling(byte).to_string(), byte.into())).collect();
    let mut merges = Vec::with_capacity(words.saturating_sub(BYTES));
    for (left, right) in of_two.chain(of_three).take(words.saturating_sub(BYTES)) {
        vocabulary.insert(format!("{left}{right}"), vocabulary.len().into());
        merges.push(format!("{left} {right}"));
    }
    let added = control.iter().enumerate().map(|(index, content)| {
        json!({
            "id": vocabulary.len() + index,
            "content": content,
            "single_word": false,
            "lstrip": false,
            "rstrip": false,
            "normalized": false,
            "special": true,
        })
    });
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true });
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": bytes,
        "post_processor": null,
        "decoder": bytes,
        "model": { "type": "BPE", "vocab": vocabulary, "merges": merges },
    });
    tokenizer.to_string().into_bytes()
}

/// How byte-level vocabularies write a byte: as the Latin-1 character of its number where that can be seen, else as one
/// of those from U+0100 on, in turn (GPT-2, `encoder.py`).
fn spelling(byte: u8) -> char {
    let is_seen = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match is_seen(byte) {
        true => char::from(byte),
        false => {
            let unseen_before = (0..byte).filter(|byte| !is_seen(*byte)).count() as u32;
            char::from_u32(0x100 + unseen_before).expect("a letter of Latin Extended-A")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::Tokenizer;

    #[test]
    fn a_vocabulary_of_any_size_spells_every_text_and_knows_its_control_tokens() {
        for words in [BYTES, 1000, 20_000] {
            let tokenizer = Tokenizer::from_bytes(&tokenizer(words, &["<|end|>", "<|pad|>"])).expect("it is valid");
            assert_eq!(tokenizer.vocabulary_size(), words + 2);
            assert_eq!(
                (tokenizer.id_of("<|end|>"), tokenizer.id_of("<|pad|>")),
                (Some(words as u32), Some(words as u32 + 1))
            );
            let text = "A cat, 猫, and \u{0}\u{7f}é\u{ad} of every kind ~";
            let ids = tokenizer.encode_plain(text).expect("it encodes");
            assert_eq!(tokenizer.decode(&ids, false).expect("it decodes"), text);
            let marked = tokenizer.encode("cat<|end|>", false).expect("it encodes");
            assert_eq!(marked.last(), Some(&(words as u32)));
        }
    }

    #[test]
    fn words_of_three_letters_are_merged_of_two() {
        let tokenizer = Tokenizer::from_bytes(&tokenizer(151_643, &[])).expect("it is valid");
        assert_eq!(tokenizer.vocabulary_size(), 151_643);
        let (last, word) = (151_642, tokenizer.decode(&[151_642], false).expect("it decodes"));
        assert_eq!(word.len(), 3);
        assert!(tokenizer.encode_plain(&word).is_ok_and(|ids| ids.len() <= 2), "{word:?} is token {last}");
    }
}
