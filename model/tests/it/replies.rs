//! Tests of replies: incremental detokenization, and stop strings.

use std::sync::LazyLock;

use bursar_model::error::TextError;
use bursar_model::text::{Detokenizer, StopReason, StopRules, Tokenizer};
use proptest::prelude::*;

use crate::common::{qwen_tokenizer, small_tokenizer};

static QWEN: LazyLock<Tokenizer> = LazyLock::new(qwen_tokenizer);
static SMALL: LazyLock<Tokenizer> = LazyLock::new(small_tokenizer);
/// A tokenizer with one token per word and no byte tokens, like the demo model's. Decoding joins
/// the words with spaces.
static WORDS: LazyLock<Tokenizer> = LazyLock::new(|| {
    let json = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [
        {"id": 3, "content": "<end>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
         "special": true}], "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null,
        "decoder": null, "model": {"type": "WordLevel", "vocab": {"red": 0, "circle": 1, "?": 2}, "unk_token": "?"}}"#;
    Tokenizer::from_bytes(json.as_bytes()).expect("the tokenizer parses")
});

/// A tokenizer with a token for each byte, whose id is the byte, and two words. Decoding strips the
/// space at the beginning, as with Llama 2.
static BYTES: LazyLock<Tokenizer> = LazyLock::new(|| {
    let mut vocabulary: serde_json::Map<_, _> =
        (0u32..256).map(|byte| (format!("<0x{byte:02X}>"), byte.into())).collect();
    vocabulary.insert("▁red".to_owned(), 256.into());
    vocabulary.insert("\u{fffd}".to_owned(), 257.into());
    let json = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    });
    Tokenizer::from_bytes(json.to_string().as_bytes()).expect("the tokenizer parses")
});

fn in_pieces(tokenizer: &Tokenizer, ids: &[u32], skip: bool) -> Vec<String> {
    let mut detokenizer = Detokenizer::new(tokenizer.clone(), skip);
    let mut pieces: Vec<_> = ids.iter().map(|&id| detokenizer.feed(id).expect("the tokens decode")).collect();
    pieces.push(detokenizer.flush().expect("the tokens decode"));
    pieces
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn pieces_of_random_tokens_join_to_the_whole_text(
        ids in prop::collection::vec(0u32..376, 0..120), skip in any::<bool>()
    ) {
        // Random bytes, most of which are not UTF-8.
        prop_assert_eq!(in_pieces(&SMALL, &ids, skip).concat(), SMALL.decode(&ids, skip).expect("the tokens decode"));
    }

    #[test]
    fn pieces_of_random_text_have_only_whole_characters(text in "\\PC{0,60}", skip in any::<bool>()) {
        for tokenizer in [&*QWEN, &*SMALL] {
            let ids = tokenizer.encode_plain(&text).expect("the text encodes");
            let whole = tokenizer.decode(&ids, skip).expect("the tokens decode");
            let pieces = in_pieces(tokenizer, &ids, skip);
            if !whole.contains('\u{fffd}') {
                prop_assert!(pieces.iter().all(|piece| !piece.contains(char::REPLACEMENT_CHARACTER)), "no piece has half a character");
                prop_assert_eq!("", pieces.last().map_or("", String::as_str), "no text is left to flush");
            }
            prop_assert_eq!(pieces.concat(), whole);
        }
    }

    #[test]
    fn only_the_named_special_tokens_are_kept(ids in prop::collection::vec(340u32..376, 0..40)) {
        // Qwen2.5's added tokens come last in the vocabulary.
        let end = SMALL.id_of("<|im_end|>").expect("a control token");
        let mut detokenizer = Detokenizer::new(SMALL.clone(), true).keeping(["<|im_end|>", "<think>"]);
        let mut whole: String = ids.iter().map(|&id| detokenizer.feed(id).expect("the tokens decode")).collect();
        whole += &detokenizer.flush().expect("the tokens decode");
        let kept: Vec<u32> = ids.into_iter().filter(|&id| id == end || !SMALL.is_special(id)).collect();
        prop_assert_eq!(whole, SMALL.decode(&kept, false).expect("the tokens decode"));
    }

    #[test]
    fn pieces_of_word_tokens_join_to_the_whole_text(ids in prop::collection::vec(0u32..4, 0..100), skip in any::<bool>()) {
        prop_assert_eq!(in_pieces(&WORDS, &ids, skip).concat(), WORDS.decode(&ids, skip).expect("the tokens decode"));
    }

    #[test]
    fn runs_of_byte_tokens_keep_their_valid_characters(
        ids in prop::collection::vec(prop_oneof![
            prop::sample::select(vec![0x41, 0xC3, 0xA9, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0xFF, 256, 257]), 0u32..256,
        ], 0..100)
    ) {
        let mut expected = String::new();
        for run in ids.chunk_by(|one, next| *one < 256 && *next < 256) {
            match run {
                [256] if expected.is_empty() => expected.push_str("red"),
                [256] => expected.push_str(" red"),
                [257] => expected.push('\u{fffd}'),
                bytes => {
                    let bytes: Vec<u8> = bytes.iter().map(|byte| u8::try_from(*byte).expect("a byte")).collect();
                    for chunk in bytes.utf8_chunks() {
                        expected += chunk.valid();
                        expected.extend(chunk.invalid().iter().map(|_| '\u{fffd}'));
                    }
                }
            }
        }
        let expected = expected.strip_prefix(' ').filter(|_| ids[0] == 32).unwrap_or(&expected);
        prop_assert_eq!(in_pieces(&BYTES, &ids, true).concat(), expected);
    }

    #[test]
    fn a_reply_stops_at_the_same_place_in_any_pieces(
        text in "[abc\u{e9}]{0,40}",
        stops in prop::collection::vec("[abc\u{e9}]{1,4}", 0..4),
        cuts in prop::collection::vec(0usize..40, 0..10),
    ) {
        // The simple reference: add one character at a time and check whether the text now ends
        // with a stop string.
        let mut expected = (text.clone(), false);
        'text: for (at, char) in text.char_indices() {
            let seen = &text[..at + char.len_utf8()];
            if let Some(longest) = stops.iter().filter(|stop| seen.ends_with(stop.as_str())).map(String::len).max() {
                expected = (seen[..seen.len() - longest].to_owned(), true);
                break 'text;
            }
        }
        let rules = StopRules::new([], stops).expect("the stop strings are valid");
        let mut filter = rules.filter();
        let mut borders: Vec<_> = cuts.into_iter().filter(|&cut| text.is_char_boundary(cut.min(text.len()))).collect();
        borders.extend([0, text.len()]);
        borders.sort_unstable();
        let (mut shown, mut stopped) = (String::new(), false);
        for pair in borders.windows(2) {
            let (piece, reason) = filter.feed(&text[pair[0].min(text.len())..pair[1].min(text.len())]);
            shown += &piece;
            stopped |= reason.is_some();
        }
        shown += &filter.flush();
        prop_assert_eq!(expected, (shown, stopped));
    }
}

#[test]
fn a_character_of_several_tokens_appears_at_once() {
    let ids = QWEN.encode_plain("𓆏").expect("the text encodes");
    assert!(ids.len() > 1, "the story needs a character of several tokens");
    let pieces = in_pieces(&QWEN, &ids, true);
    let expected: Vec<_> = (1..ids.len()).map(|_| "").chain(["𓆏", ""]).collect();
    assert_eq!(expected, pieces);
}

#[test]
fn a_truncated_character_ends_the_reply_with_a_replacement_character() {
    let ids = QWEN.encode_plain("𓆏").expect("the text encodes");
    let pieces = in_pieces(&QWEN, &ids[..1], true);
    assert_eq!(vec!["", "\u{fffd}"], pieces);
}

#[test]
fn text_that_could_become_a_stop_string_is_held_back() {
    let rules = StopRules::new([7], vec!["\nUser:".into(), "###".into()]).expect("the stop strings are valid");
    assert!(rules.stops_at(7) && !rules.stops_at(8));
    let mut filter = rules.filter();
    assert_eq!(("Yes.".into(), None), filter.feed("Yes.\nUs"));
    assert_eq!(("\nUs".into(), None), filter.feed("#"));
    assert_eq!(("#e".into(), None), filter.feed("e#"));
    assert_eq!((String::new(), Some(StopReason::String("###".into()))), filter.feed("##more"));
    assert_eq!((String::new(), Some(StopReason::String("###".into()))), filter.feed("and more"));
    assert_eq!("", filter.flush());
}

#[test]
fn empty_long_or_too_many_stop_strings_are_refused() {
    for strings in [vec![String::new()], vec!["x".into(); 17], vec!["x".repeat(1025)]] {
        let error = StopRules::new([], strings).expect_err("the stop strings are refused");
        assert!(matches!(error, TextError::StopStrings { .. }), "{error}");
    }
}

#[test]
fn a_space_at_the_beginning_is_stripped_also_from_byte_tokens() {
    for (ids, expected) in
        [(&[32][..], ""), (&[32, 256], " red"), (&[32, 32, 0xC3, 0xA9], " é"), (&[256, 32, 256], "red  red")]
    {
        assert_eq!(in_pieces(&BYTES, ids, true).concat(), expected, "{ids:?}");
        assert_eq!(BYTES.decode(ids, true).expect("the tokens decode"), expected, "{ids:?}");
    }
}

#[test]
fn a_character_of_byte_tokens_appears_before_the_run_ends() {
    let pieces = in_pieces(&BYTES, &[256, 0xC3, 0xA9, 0xE4, 0xBD, 256, 0xE4], true);
    assert_eq!(pieces, ["red", "", "é", "", "", "\u{fffd}\u{fffd} red", "", "\u{fffd}"]);
}
