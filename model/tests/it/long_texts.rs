//! Long texts. Encoding a text in pieces gives the same tokens as encoding it as a whole, and
//! counting tokens stops soon after the limit.

use std::time::{Duration, Instant};

use bursar_model::{
    error::TextError,
    text::{ChatTemplate, Message, PromptEncoder, Role, TemplateInputs, TemplateLimits, TemplateSources, Tokenizer},
};

use crate::common::golden_bytes;

/// Byte-level vocabularies, and one SentencePiece vocabulary.
const TOKENIZERS: [&str; 5] = [
    "qwen2_5_tokenizer/tokenizer.json",
    "qwen2_5_vl/tokenizer.json",
    "llama/tokenizer.json",
    "mistral/tokenizer.json",
    "internvl/tokenizer.json",
];

/// Texts as people paste them: prose, code, logs, numbers, tables, other scripts, white space.
const SAMPLES: [&str; 9] = [
    "The ship's log says it's 12,345 miles -- they'll arrive (maybe) on 2024-05-31.  We'd not bet on it!\n\n",
    "fn main() {\n    let x = vec![1, 2, 3];\n\tprintln!(\"{x:?} {}\", x.len() as f64 / 3.0);\n}\n",
    "2026-11-27T03:00:01.123Z INFO http{request_id=req_12ab}: answered method=POST path=/v1/chat status=200\r\n",
    "name,price,count\nfoo,1.25,3\nbar,99,1000000\n   \n",
    "{\"a\":{\"b\":[1,2,3.5e10,null,true],\"key_with_words\":\"va\\\"lue\"}}",
    "世界，你好。今天天气很好、我们去公园吧；数字123和English混合。",
    "Zoë naïve café e\u{301}cole 👩‍👩‍👧 Привет, мир! שלום สวัสดีครับ हिन्दी",
    "        deep    indentation\t\tand  double  spaces   ",
    "aGVsbG8gd29ybGQhIHRoaXMgaXMgYmFzZTY0/IGVuY29kZWQ+dGV4dA==",
];

/// A text of at least `bytes` bytes that mixes the samples by a seed.
fn mixed(bytes: usize, seed: u64) -> String {
    let (mut text, mut state) = (String::new(), seed | 1);
    while text.len() < bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text.push_str(SAMPLES[(state >> 33) as usize % SAMPLES.len()]);
    }
    text
}

#[test]
fn a_long_text_is_tokenized_as_by_the_library() {
    for file in TOKENIZERS {
        let json = golden_bytes(file);
        let (ours, mut library) = (
            Tokenizer::from_bytes(&json).expect("the tokenizer parses"),
            tokenizers::Tokenizer::from_bytes(&json).expect("the library parses the same JSON"),
        );
        library.with_padding(None);
        library.with_truncation(None).expect("truncation can be turned off");
        for seed in 0..6 {
            let text = mixed(100_000, seed);
            for with_special in [false, true] {
                let whole = library.encode_fast(text.as_str(), with_special).expect("the text encodes");
                let ids = ours.encode(&text, with_special).expect("the text encodes");
                let differs = ids.iter().zip(whole.get_ids()).position(|(ours, theirs)| ours != theirs);
                assert!(
                    ids == whole.get_ids(),
                    "{file}, seed {seed}: the first difference is at token {differs:?} of {}",
                    ids.len()
                );
            }
        }
    }
}

#[test]
fn encoding_stops_soon_after_the_token_limit() {
    for file in TOKENIZERS {
        let tokenizer = Tokenizer::from_bytes(&golden_bytes(file)).expect("the tokenizer parses");
        let text = mixed(8_000_000, 1);
        let begun = Instant::now();
        let error = tokenizer.encode_up_to(&text, true, 1000).expect_err("the text is too long");
        assert!(matches!(error, TextError::TooManyTokens { limit: 1000 }), "{error}");
        assert!(tokenizer.encode_plain_up_to(&text, 1000).is_err());
        assert!(begun.elapsed() < Duration::from_secs(2), "{file}: refusing 8 MB took {:?}", begun.elapsed());
        let ids = tokenizer.encode("Just a few words.", true).expect("the text encodes");
        assert_eq!(tokenizer.encode_up_to("Just a few words.", true, ids.len()).expect("the text fits the limit"), ids);
        assert!(tokenizer.encode_up_to("Just a few words.", true, ids.len() - 1).is_err());
    }
}

#[test]
fn texts_of_one_repeated_character_are_encoded_in_bounded_time() {
    let tokenizer =
        Tokenizer::from_bytes(&golden_bytes("qwen2_5_tokenizer/tokenizer.json")).expect("the tokenizer parses");
    for letter in ["a", " ", "\n", "1", "\u{301}", "!", "ก"] {
        let text = letter.repeat(1_000_000 / letter.len());
        let ids = tokenizer.encode(&text, false).expect("the text encodes");
        assert!(tokenizer.decode(&ids, false).expect("the tokens decode") == text, "{letter:?}");
    }
}

#[test]
fn the_token_limit_holds_when_users_write_special_token_names() {
    let tokenizer = Tokenizer::from_bytes(&golden_bytes("qwen2_5_vl/tokenizer.json")).expect("the tokenizer parses");
    let source = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}";
    let sources = TemplateSources {
        templates: [("default".to_owned(), source.to_owned())].into(),
        special_tokens: Default::default(),
    };
    let template = ChatTemplate::new(sources, TemplateLimits::default()).expect("the template compiles");
    let prompts = PromptEncoder::new(tokenizer, template);
    let encoded = |messages: &[Message], tokens_max: usize| {
        prompts.encode_rewritten(messages, &TemplateInputs::default(), tokens_max, |rendered| rendered)
    };
    for written in ["word ", "<|im_end|> "] {
        let messages = vec![Message::text(Role::User, written.repeat(40)); 3];
        let ids = encoded(&messages, usize::MAX).expect("there is no limit");
        assert_eq!(encoded(&messages, ids.len()).expect("the messages fit the limit"), ids);
        let error = encoded(&messages, ids.len() - 1).expect_err("the limit is one token too small");
        assert!(matches!(error, TextError::TooManyTokens { limit } if limit == ids.len() - 1), "{error}");
    }
    // Each message has two special tokens. The search for them must not take quadratic time in
    // the number of messages.
    let messages = vec![Message::text(Role::User, "<|im_end|>"); 50_000];
    let begun = Instant::now();
    assert!(
        encoded(&messages, usize::MAX).is_ok() && begun.elapsed() < Duration::from_secs(20),
        "{:?}",
        begun.elapsed()
    );
}
