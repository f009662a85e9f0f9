//! Structured output: for any logits, a reply follows its format and ends by itself.

use std::sync::LazyLock;

use bursar_budgets::Hint;
use bursar_model::error::{GrammarError, SamplingError};
use bursar_model::sampling::{
    Grammar, GrammarCompiler, JsonWhitespace, OutputFormat, Past, Sampler, SamplerScratch, SamplingParams, philox,
};
use bursar_model::text::Tokenizer;
use serde_json::{Value, json};

use crate::common;

/// A vocabulary with its grammar compiler. The logits are wider than the tokenizer,
/// as in padded checkpoints.
pub(crate) struct Model {
    pub(crate) name: &'static str,
    pub(crate) tokenizer: Tokenizer,
    vocabulary: usize,
    pub(crate) ends: Vec<u32>,
    pub(crate) compiler: GrammarCompiler,
}

impl Model {
    fn new(name: &'static str, tokenizer: Tokenizer, vocabulary: usize, ends: &[&str]) -> Self {
        let ends: Vec<u32> = ends.iter().map(|end| tokenizer.id_of(end).expect("an end token")).collect();
        let compiler = GrammarCompiler::new(&tokenizer, vocabulary, &ends).expect("a byte-level vocabulary");
        Model { name, tokenizer, vocabulary, ends, compiler }
    }

    fn grammar(&self, format: &OutputFormat) -> Grammar {
        self.compiler.compile(format).unwrap_or_else(|error| panic!("{}: {error} {error:?}", self.name))
    }

    fn is_special(&self, id: u32) -> bool {
        self.tokenizer.added_tokens().iter().any(|token| token.special && token.id == id)
    }
}

static DEMO: LazyLock<Model> = LazyLock::new(|| {
    let checkpoint = bursar_model::demo::checkpoint();
    let json = checkpoint.require("tokenizer.json").expect("a tokenizer");
    Model::new(
        "demo",
        Tokenizer::from_bytes(&json).expect("the tokenizer parses"),
        864,
        &["<|im_end|>", "<|endoftext|>"],
    )
});

static SMALL: LazyLock<Model> = LazyLock::new(|| Model::new("small", common::small_tokenizer(), 384, &["<|im_end|>"]));

/// Qwen2.5's vocabulary, with the width of its logits.
pub(crate) static QWEN: LazyLock<Model> =
    LazyLock::new(|| Model::new("qwen", common::qwen_tokenizer(), 152_064, &["<|im_end|>", "<|endoftext|>"]));

pub(crate) fn models() -> [&'static Model; 3] {
    [&DEMO, &SMALL, &QWEN]
}

/// A random row, equal for equal seed and step.
fn random_row(vocabulary: usize, seed: u64, step: usize, row: &mut Vec<f32>) {
    row.clear();
    let place = (step as u64) << 32;
    row.extend((0..vocabulary as u64).map(|id| (philox::uniform(seed, place + id) * 24.0 - 12.0) as f32));
}

/// A reply from random logits, without its end token, and whether it ended by itself.
pub(crate) fn reply(model: &Model, grammar: &Grammar, params: SamplingParams, tokens_max: usize) -> (Vec<u32>, bool) {
    let seed = params.seed;
    let sampler = Sampler::new(params, model.vocabulary).expect("valid parameters").with_grammar(grammar.clone());
    assert!(sampler.reads_past() && !sampler.is_plain_argmax());
    let (mut scratch, mut row, mut produced) = (SamplerScratch::default(), Vec::new(), Vec::new());
    while produced.len() < tokens_max {
        random_row(model.vocabulary, seed, produced.len(), &mut row);
        let token = sampler.sample(&row, Past::new(&[], &produced), &mut scratch).expect("a token");
        if model.ends.contains(&token.id) {
            return (produced, true);
        }
        assert!(!model.is_special(token.id), "{}: token {} is special", model.name, token.id);
        produced.push(token.id);
    }
    (produced, false)
}

/// Greedy and sampled replies as text. Asserts that all replies have ended.
fn replies(model: &Model, format: &OutputFormat, count: u64) -> Vec<String> {
    let grammar = model.grammar(format);
    let params = |seed: u64| SamplingParams {
        temperature: if seed.is_multiple_of(2) { 0.0 } else { 4.0 },
        top_p: if seed.is_multiple_of(3) { 0.9 } else { 1.0 },
        seed,
        ..Default::default()
    };
    let texts = (0..count).map(|seed| {
        let (produced, ended) = reply(model, &grammar, params(seed), 1_500);
        assert!(ended, "{}: the reply in {format:?} did not end with seed {seed}", model.name);
        let text = model.tokenizer.decode(&produced, false).expect("the tokens decode");
        assert!(!text.contains('\u{fffd}'), "{}: the reply ends within a character", model.name);
        text
    });
    texts.collect()
}

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 12},
            "größe": {"type": "integer", "minimum": 50, "maximum": 230},
            "kind": {"enum": ["child", "adult", "日本 🎉"]},
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
            "scores": {"type": "array", "minItems": 1, "maxItems": 4, "items": {"$ref": "#/$defs/score"}},
            "note": {"anyOf": [{"type": "null"}, {"type": "boolean"}]}
        },
        "required": ["name", "größe", "kind", "code", "scores"],
        "additionalProperties": false,
        "$defs": {"score": {"type": "object", "properties": {"points": {"type": "number", "minimum": 0, "maximum": 9.5}},
            "required": ["points"], "additionalProperties": false}}
    })
}

/// Checks a value against the schema, field by field.
fn is_person(value: &Value) -> bool {
    let known = ["name", "größe", "kind", "code", "scores", "note"];
    let object = value.as_object().expect("an object");
    let name = value["name"].as_str().expect("a name").chars().count();
    let size = value["größe"].as_i64().expect("a size");
    let code = value["code"].as_str().expect("a code");
    let scores = value["scores"].as_array().expect("scores");
    let score = |score: &Value| {
        let points = score["points"].as_f64().expect("points");
        (0.0..=9.5).contains(&points) && score.as_object().expect("an object").len() == 1
    };
    object.keys().all(|key| known.contains(&key.as_str()))
        && (1..=12).contains(&name)
        && (50..=230).contains(&size)
        && ["child", "adult", "日本 🎉"].contains(&value["kind"].as_str().expect("a kind"))
        && matches(r"[A-Z]{2}-[0-9]{3}", code)
        && (1..=4).contains(&scores.len())
        && scores.iter().all(score)
        && object.get("note").is_none_or(|note| note.is_null() || note.is_boolean())
}

fn matches(pattern: &str, text: &str) -> bool {
    regex::Regex::new(&format!(r"\A(?:{pattern})\z")).expect("a pattern").is_match(text)
}

#[test]
fn a_reply_to_a_schema_conforms_to_it() {
    for (model, count) in models().into_iter().zip([12, 12, 4]) {
        let texts = replies(model, &OutputFormat::json(person()), count);
        for text in &texts {
            let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{}: {error}", model.name));
            assert!(is_person(&value), "{}: {value}", model.name);
        }
        assert!(
            texts.iter().collect::<std::collections::BTreeSet<_>>().len() > 2,
            "sampling yields at most two different texts"
        );
    }
}

#[test]
fn json_is_compact_unless_whitespace_is_requested() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "array", "minItems": 2, "maxItems": 2,
        "items": {"enum": [1, 2]}}, "b": {"type": "boolean"}}, "required": ["a", "b"], "additionalProperties": false});
    for model in models() {
        let written =
            |whitespace, count| replies(model, &OutputFormat::JsonSchema { schema: schema.clone(), whitespace }, count);
        for text in written(JsonWhitespace::Compact, 4) {
            let value: Value = serde_json::from_str(&text).expect("JSON");
            assert_eq!(text, value.to_string(), "{}", model.name);
        }
        for text in written(JsonWhitespace::Spaced, 4) {
            let value: Value = serde_json::from_str(&text).expect("JSON");
            assert_eq!(text, value.to_string().replace(',', ", ").replace(':', ": "), "{}", model.name);
        }
        let free = written(JsonWhitespace::Free, 8);
        assert!(free.iter().any(|text| text.contains(['\n', ' ', '\t'])), "{}: {free:?}", model.name);
    }
}

#[test]
fn a_schema_error_names_the_place_in_the_schema() {
    let fault = json!({"properties": {"a": {"type": "string"}, "b/c": {"items": {"anyOf": [{}, {"type": "zebra"}]}}}});
    let error = DEMO.compiler.compile(&OutputFormat::json(fault)).expect_err("the type is unknown");
    let reason = error.reason().expect("the error has a reason");
    assert!(reason.contains("zebra") && reason.contains("/properties/b~1c/items/anyOf/1"), "{reason}");
}

#[test]
fn a_recursive_schema_nests_and_closes() {
    let tree = json!({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object",
        "properties": {"v": {"type": "integer", "minimum": 0, "maximum": 9},
            "c": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/node"}}},
        "required": ["v", "c"], "additionalProperties": false}}});
    fn depth(node: &Value) -> usize {
        assert!(node["v"].as_i64().is_some_and(|v| (0..=9).contains(&v)));
        1 + node["c"].as_array().expect("children").iter().map(depth).max().unwrap_or(0)
    }
    let texts = replies(&SMALL, &OutputFormat::json(tree), 30);
    let depths: Vec<_> =
        texts.iter().map(|text| depth(&serde_json::from_str(text).expect("the text is JSON"))).collect();
    assert!(depths.iter().any(|&depth| depth > 1), "{depths:?}");
}

#[test]
fn a_reply_to_a_pattern_matches_it() {
    let patterns = [
        r"[0-9]{3}-[0-9]{4}",
        r"(?i)straße \d{1,3}[a-c]?",
        r"[äöü日本🎉]{5,9}",
        r"\w{1,8}@\w{1,8}\.(org|com)",
        r"/a\\b/\n",
        r"",
        r"(yes|no)(, (yes|no)){0,3}",
        r"\p{Greek}{2,6}",
    ];
    for (model, count) in models().into_iter().zip([6, 6, 2]) {
        for pattern in patterns {
            for text in replies(model, &OutputFormat::Regex(pattern.to_owned()), count) {
                assert!(matches(pattern, &text), "{}: {text:?} for {pattern}", model.name);
            }
        }
    }
    // Anchors at both ends change nothing, because the whole reply must match.
    assert!(replies(&DEMO, &OutputFormat::Regex("^[ab]{4}$".into()), 4).iter().all(|text| matches("[ab]{4}", text)));
}

#[test]
fn a_reply_to_choices_is_one_choice() {
    let choices: Vec<String> =
        ["yes", "yes!", "größer", "日本 🎉", "a|b(c", "/\\\"\n\0\t# ", "<|im_end|>", ""].map(str::to_owned).into();
    for (model, count) in models().into_iter().zip([40, 40, 10]) {
        let texts = replies(model, &OutputFormat::Choice(choices.clone()), count);
        assert!(texts.iter().all(|text| choices.contains(text)), "{}: {texts:?}", model.name);
        assert!(texts.iter().collect::<std::collections::BTreeSet<_>>().len() > 1, "{}: {texts:?}", model.name);
    }
    // The text of an end token can be spelled without ending the reply.
    let spelled = replies(&QWEN, &OutputFormat::Choice(vec!["<|im_end|>".into()]), 2);
    assert!(spelled.iter().all(|text| text == "<|im_end|>"));
}

#[test]
fn an_unconstrained_schema_gives_valid_json() {
    // A random reply may never end, so the test only checks that the reply is the beginning of a
    // JSON value.
    for schema in [json!(true), json!({})] {
        let grammar = DEMO.grammar(&OutputFormat::json(schema));
        for seed in 0..20 {
            let params = SamplingParams { temperature: 1.0, seed, ..Default::default() };
            let (produced, ended) = reply(&DEMO, &grammar, params, 60);
            let text = DEMO.tokenizer.decode(&produced, false).expect("the tokens decode");
            match serde_json::from_str::<Value>(&text) {
                Ok(_) => {}
                // 1e999 is JSON as well, but too large for an f64.
                Err(error) if error.to_string().starts_with("number out of range") => {}
                Err(error) => assert!(!ended && error.is_eof() || text.ends_with('\u{fffd}'), "{error}"),
            }
        }
    }
}

#[test]
fn end_tokens_are_allowed_only_when_the_reply_is_complete() {
    for model in models() {
        let grammar = model.grammar(&OutputFormat::Regex("[0-9]{2,3}".into()));
        let digit = model.tokenizer.id_of("7").expect("a digit");
        let ends = |produced: &[u32]| {
            let allowed = grammar.allowed(produced).expect("an answer");
            let counts = model.ends.iter().filter(|end| allowed.contains(**end)).count();
            assert!(counts == 0 || counts == model.ends.len(), "{counts} end tokens are allowed; expected all or none");
            (counts > 0, allowed.only_ends())
        };
        assert_eq!([(false, false); 2], [ends(&[]), ends(&[digit])]);
        assert_eq!([(true, false), (true, true)], [ends(&[digit; 2]), ends(&[digit; 3])]);
        // After the end, the grammar allows only end tokens.
        assert_eq!((true, true), ends(&[digit, digit, model.ends[0]]));
        let allowed = grammar.allowed(&[digit, digit]).expect("an answer");
        assert!(allowed.ids().iter().all(|id| model.ends.contains(id) || !model.is_special(*id)));
        assert_eq!(allowed.ids().len(), allowed.count());
        assert!(!allowed.contains(u32::MAX) && !allowed.contains(model.vocabulary as u32 - 1));
    }
}

#[test]
fn recomputed_grammar_masks_are_the_same() {
    for model in [&*SMALL, &*QWEN] {
        let grammar = model.grammar(&OutputFormat::json(person()));
        let params = SamplingParams { temperature: 4.0, seed: 5, ..Default::default() };
        let (produced, _) = reply(model, &grammar, params, 60);
        let masks: Vec<_> =
            (0..=produced.len()).map(|end| grammar.allowed(&produced[..end]).expect("a mask").ids()).collect();
        // Forward and backward, on the same grammar and on a clone of it. Earlier
        // calls must not matter.
        let clone = grammar.clone();
        let mut place = 0;
        for _ in 0..40 {
            place = (place * 31 + 17) % masks.len();
            for grammar in [&grammar, &clone] {
                assert!(
                    masks[place] == grammar.allowed(&produced[..place]).expect("a mask").ids(),
                    "the mask after {place} tokens has changed"
                );
            }
        }
        // The mask at each step allowed the token.
        assert!(produced.iter().zip(&masks).all(|(token, mask)| mask.binary_search(token).is_ok()));
    }
}

#[test]
fn a_grammar_rolls_back_over_rejected_drafts() {
    let formats = [
        OutputFormat::json(person()),
        OutputFormat::Regex("[a-c]{3}(x|yz){2,20}".to_owned()),
        OutputFormat::json(json!(true)),
    ];
    for (model, format) in models().into_iter().flat_map(|model| formats.iter().map(move |format| (model, format))) {
        let grammar = model.grammar(format);
        let params = |seed| SamplingParams { seed, temperature: 1.0, ..SamplingParams::default() };
        let [reply, other] = [5, 6].map(|seed| reply(model, &grammar, params(seed), 60).0);
        // After each token, three tokens of another reply are drafted, as far as they are allowed.
        for end in 0..reply.len() {
            let produced = &reply[..end];
            let drafts = &other[end.min(other.len())..(end + 3).min(other.len())];
            let allowed = grammar.allowed_prefix_len(produced, drafts).expect("the reply follows the grammar");
            for count in 0..=allowed {
                let drafted = [produced, &drafts[..count]].concat();
                let [expected, found] = [&grammar.clone(), &grammar].map(|grammar| grammar.allowed(&drafted));
                let expected = expected.expect("drafts that are allowed").ids();
                assert_eq!(found.expect("drafts that are allowed").ids(), expected, "{}", model.name);
                let follows = drafts.get(count).is_some_and(|next| expected.contains(next));
                assert_eq!(follows, count < allowed, "{}: draft {count} of {allowed} after {end} tokens", model.name);
            }
        }
        assert_eq!(grammar.allowed_prefix_len(&reply, &[u32::MAX]).expect("the reply follows the grammar"), 0);
    }
}

#[test]
fn clones_of_a_grammar_are_independent() {
    let grammar = SMALL.grammar(&OutputFormat::Choice(vec!["aa".into(), "bb".into()]));
    let clone = grammar.clone();
    let id = |text: &str| SMALL.tokenizer.id_of(text).expect("a letter");
    let allowed = |grammar: &Grammar, produced: &[u32]| grammar.allowed(produced).expect("a mask");
    let (a, b) = (allowed(&grammar, &[id("a")]), allowed(&clone, &[id("b")]));
    assert!(a.contains(id("a")) && !a.contains(id("b")));
    assert!(b.contains(id("b")) && !b.contains(id("a")));
    assert!(allowed(&grammar, &[id("a"), id("a")]).only_ends() && allowed(&clone, &[id("b"), id("b")]).only_ends());
}

#[test]
fn a_disallowed_token_is_a_typed_error() {
    let grammar = DEMO.grammar(&OutputFormat::Regex("[0-9]+".into()));
    let id = |text: &str| DEMO.tokenizer.id_of(text).expect("a token");
    for wrong in [id("a"), id("<|im_start|>"), DEMO.ends[0], 863, u32::MAX] {
        let error = grammar.allowed(&[wrong]).expect_err("the token does not follow");
        assert!(matches!(error, GrammarError::NotFollowed { produced: 1 } | GrammarError::Broken { .. }), "{error:?}");
        assert!(grammar.allowed(&[id("1")]).expect("the token follows").contains(DEMO.ends[0]));
    }
    let sampler = Sampler::new(SamplingParams::default(), 864).expect("the sampler is valid").with_grammar(grammar);
    let error = sampler.sample(&[0.0; 864], Past::new(&[], &[id("1"), id("a")]), &mut SamplerScratch::default());
    let error = error.expect_err("the token does not follow");
    assert_eq!(SamplingError::Grammar(GrammarError::NotFollowed { produced: 2 }), error);
    assert!(!error.hint().is_empty());
}

#[test]
fn a_complete_reply_may_end_below_the_minimum_length() {
    let grammar = DEMO.grammar(&OutputFormat::Regex("[0-9]{1,2}".into()));
    let sampler = Sampler::new(SamplingParams::default(), 864).expect("the sampler is valid");
    let sampler = sampler
        .with_grammar(grammar)
        .with_tokens_min(10, DEMO.ends.clone().into())
        .expect("the end tokens are few enough");
    let mut row = vec![0.0; 864];
    DEMO.ends.iter().for_each(|&end| row[end as usize] = 50.0);
    let next = |produced: &[u32]| {
        sampler.sample(&row, Past::new(&[], produced), &mut SamplerScratch::default()).expect("a token").id
    };
    let first = next(&[]);
    let second = next(&[first]);
    assert!(!DEMO.ends.contains(&second), "the grammar allows an end, but the reply is shorter than the minimum");
    assert!(DEMO.ends.contains(&next(&[first, second])), "the grammar allows only an end");
}

#[test]
fn a_bias_chooses_only_among_allowed_tokens() {
    let grammar = DEMO.grammar(&OutputFormat::Regex("[ab]{6}".into()));
    let id = |text: &str| DEMO.tokenizer.id_of(text).expect("a letter");
    let params = SamplingParams { logit_bias: [(id("c"), 100.0), (id("a"), 50.0)].into(), ..Default::default() };
    let (produced, ended) = reply(&DEMO, &grammar, params, 10);
    assert!(ended && produced == [id("a"); 6]);
}

/// Refused forms, the kind of each error, and whether the error has a reason.
#[test]
fn unsupported_reply_formats_are_refused_with_a_reason() {
    let schema = OutputFormat::json;
    let regex = |pattern: &str| OutputFormat::Regex(pattern.to_owned());
    let deep = (0..200).fold(json!({}), |inner, _| json!({"allOf": [inner]}));
    let wide: Vec<Value> = (0..300).map(|bound| json!({"type": "string", "maxLength": bound + 5})).collect();
    let cases = [
        ("schema", schema(json!("not a schema"))),
        ("schema", schema(json!(false))),
        ("schema", schema(json!({"type": "text"}))),
        ("place", schema(json!({"if": {"type": "string"}}))),
        ("schema", schema(json!({"$ref": "https://example.org/schema"}))),
        ("schema", schema(json!({"$ref": "#"}))),
        ("schema", schema(json!({"type": "string", "minLength": 5, "maxLength": 4}))),
        ("schema", schema(json!({"type": "integer", "multipleOf": 4_000_000_000u64}))),
        ("large", schema(deep)),
        ("large", schema(json!({"const": "x".repeat(70_000)}))),
        ("complex", schema(json!({"anyOf": wide}))),
        (
            "complex",
            schema(
                json!({"type": "string", "allOf": (0..9).map(|i| json!({"pattern": format!("x{i}")})).collect::<Vec<_>>()}),
            ),
        ),
        ("regex", regex("(a")),
        ("regex", regex("[z-a]")),
        ("regex", regex("(?=a)b")),
        ("regex", regex(r"(?-u:\xff)")),
        ("unsupported", regex(r"\bfoo\b")),
        ("unsupported", regex("[a&&b]")),
        ("large", regex(&"a".repeat(20_000))),
        ("complex", regex(r"\w{1,1000}\d{1,1000}\pL{1,1000}(a|b)*a(a|b){200}|.*x.{500}y|\pL+\d{900}")),
        ("none", OutputFormat::Choice(vec![])),
        ("large", OutputFormat::Choice(vec!["a".into(); 3_000])),
        ("large", OutputFormat::Choice(vec!["a".repeat(70_000)])),
    ];
    for (index, (kind, format)) in cases.into_iter().enumerate() {
        let error = QWEN.compiler.compile(&format).expect_err(kind);
        let (found, field_text) = match &error {
            GrammarError::Schema { reason } => ("schema", !reason.0.is_empty()),
            GrammarError::Keyword { place, .. } | GrammarError::Number { place, .. } => {
                ("place", place.path().starts_with('#'))
            }
            GrammarError::UnsupportedRegex { reason } => ("unsupported", !reason.0.is_empty()),
            GrammarError::Regex { kind, .. } => ("regex", !kind.is_empty()),
            GrammarError::TooLarge { value, limit, .. } => ("large", value > limit),
            GrammarError::TooComplex => ("complex", true),
            GrammarError::NoChoice => ("none", true),
            other => panic!("{index}: {other:?}"),
        };
        assert_eq!((kind, true), (found, field_text), "{index}: {error:?}");
        assert!(!error.hint().is_empty());
    }
}

/// The limit applies to the number of patterns that one string must match.
#[test]
fn a_schema_may_have_many_patterns_for_different_strings() {
    let properties: serde_json::Map<String, Value> = (0..30)
        .map(|i| (format!("p{i}"), json!({"$ref": "#/$defs/id", "description": "a name"})))
        .chain((0..30).map(|i| (format!("q{i}"), json!({"type": "string", "pattern": format!("^a{i}$")}))))
        .collect();
    let id = json!({"type": "string", "pattern": "^[a-z]{1,8}$"});
    let object = json!({"$defs": {"id": id}, "type": "object", "properties": properties, "required": ["p0", "q7"],
        "additionalProperties": false});
    for text in replies(&DEMO, &OutputFormat::json(object), 2) {
        let value: Value = serde_json::from_str(&text).expect("JSON");
        assert!(matches("[a-z]{1,8}", value["p0"].as_str().expect("a text")) && value["q7"] == "a7", "{text}");
    }
    let both = json!({"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "b$"}, {"maxLength": 6}]});
    for text in replies(&DEMO, &OutputFormat::json(both), 2) {
        let value: String = serde_json::from_str(&text).expect("JSON");
        assert!(value.starts_with('a') && value.ends_with('b'), "{text}");
    }
}

#[test]
fn errors_and_debug_output_hide_schemas_patterns_and_replies() {
    let secrets = [
        OutputFormat::json(json!({"properties": {"zebra": {"type": "zebra"}}})),
        OutputFormat::json(json!({"$ref": "zebra"})),
        OutputFormat::Regex("(zebra".into()),
        OutputFormat::Regex(r"zebra\b!".into()),
    ];
    for format in secrets {
        let error = DEMO.compiler.compile(&format).expect_err("the format is refused");
        let shown = format!("{format:?} {error} {error:?} {}", error.hint());
        assert!(!shown.contains("zebra"), "{shown}");
    }
    let grammar = DEMO.grammar(&OutputFormat::Choice(vec!["zebra".into()]));
    let ids = DEMO.tokenizer.encode_plain("zebr").expect("the text encodes");
    let allowed = grammar.allowed(&ids).expect("the token follows");
    let broken = grammar.allowed(&[ids.clone(), ids].concat()).expect_err("the token does not follow");
    let shown = format!("{grammar:?} {allowed:?} {broken:?} {broken} {:?}", DEMO.compiler);
    assert!(!shown.contains("zebr"), "{shown}");
}

/// Patterns and schemas designed to take forever or to fill memory. Each is refused, or
/// followed for a hundred tokens. All together take under a minute on a slow machine
/// (two seconds were measured).
#[test]
fn hostile_schemas_and_patterns_end_in_bounded_time() {
    let regex = |pattern: &str| OutputFormat::Regex(pattern.to_owned());
    let doubling: serde_json::Map<String, Value> = (1..40)
        .map(|level| {
            (format!("d{level}"), json!({"allOf": vec![json!({"$ref": format!("#/$defs/d{}", level - 1)}); 2]}))
        })
        .chain([("d0".to_owned(), json!({"type": "object", "properties": {"a": {"type": "integer"}}}))])
        .collect();
    let arrays: Vec<Value> =
        (0..8).map(|i| json!({"type": "array", "items": {"$ref": "#/$defs/a"}, "maxItems": 100 + i})).collect();
    let pattern = |i: usize| json!({"pattern": format!("x{i}y")});
    let meeting: Vec<Value> = (0..40).map(pattern).collect();
    let merged: Vec<Value> = (0..40).map(|i| json!({"properties": {"a": pattern(i)}})).collect();
    let mut chain: serde_json::Map<String, Value> = (1..40)
        .map(|i| (format!("d{i}"), json!({"pattern": format!("x{i}y"), "$ref": format!("#/$defs/d{}", i - 1)})))
        .collect();
    chain.insert("d0".into(), json!({"type": "string"}));
    let formats = [
        OutputFormat::json(json!({"type": "string", "allOf": meeting})),
        OutputFormat::json(json!({"type": "object", "allOf": merged})),
        OutputFormat::json(json!({"$defs": chain, "$ref": "#/$defs/d39"})),
        regex("((((x{100}){100}){100}){100}){100}"),
        regex("(((((a+)+)+)+)+)+b"),
        regex("(a|b)*a(a|b){400}"),
        regex(".*a.{400}"),
        regex(r"\w{1,1000}\d{1,1000}\pL{1,1000}"),
        regex("(.*x.*){30}"),
        regex(&"(".repeat(5_000)),
        OutputFormat::json(json!({"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000_000})),
        OutputFormat::json(json!({"type": "string", "minLength": 1_000_000_000})),
        OutputFormat::json(json!({"type": "object", "minProperties": 50_000})),
        OutputFormat::json(json!({"type": "number", "multipleOf": 1e-30})),
        OutputFormat::json(json!({"type": "string", "minLength": "ä".repeat(80)})),
        OutputFormat::json(json!({"$defs": doubling, "$ref": "#/$defs/d39"})),
        OutputFormat::json(json!({"$defs": {"a": {"anyOf": arrays}}, "$ref": "#/$defs/a"})),
    ];
    let begin = std::time::Instant::now();
    for format in formats {
        let Ok(grammar) = QWEN.compiler.compile(&format) else { continue };
        let mut produced = Vec::new();
        for step in 0..100 {
            match grammar.allowed(&produced) {
                Ok(allowed) if allowed.only_ends() => break,
                Ok(allowed) => {
                    let ids = allowed.ids();
                    let place = (philox::uniform(3, step) * ids.len() as f64) as usize;
                    produced.push(ids[place]);
                    if QWEN.ends.contains(&ids[place]) {
                        break;
                    }
                }
                Err(error) => {
                    assert_eq!(GrammarError::TooComplex, error);
                    break;
                }
            }
        }
    }
    assert!(begin.elapsed().as_secs() < 60, "{:?}", begin.elapsed());
}

#[test]
fn grammars_require_an_end_token_and_a_known_tokenizer() {
    let tokenizer = common::small_tokenizer();
    assert_eq!(Some(GrammarError::NoEndToken), GrammarCompiler::new(&tokenizer, 384, &[]).err());
    assert_eq!(
        Some(GrammarError::NoEndToken),
        GrammarCompiler::new(&tokenizer, 384, &[384]).err(),
        "the end token is beyond the logits"
    );
    let json = r###"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}"###;
    let strange = Tokenizer::from_bytes(json.as_bytes()).expect("a tokenizer");
    assert_eq!(Some(GrammarError::Spelling), GrammarCompiler::new(&strange, 2, &[1]).err());
}

/// Llama's format: text with marked spaces, and byte tokens for everything else.
#[test]
fn byte_fallback_tokens_spell_text_without_tokens() {
    let bytes = (0..=255).map(|byte| format!("<0x{byte:02X}>"));
    let words = ["</s>", "▁", "a", "b", "▁ab", "ü"].map(str::to_owned);
    let vocabulary: serde_json::Map<_, _> = words.into_iter().chain(bytes).zip((0..).map(Value::from)).collect();
    let json = json!({"version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null,
        "added_tokens": [{"id": 0, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "post_processor": null, "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "byte_fallback": true, "vocab": vocabulary, "merges": []}});
    let tokenizer = Tokenizer::from_bytes(json.to_string().as_bytes()).expect("a tokenizer");
    let model = Model::new("fallback", tokenizer, 262, &["</s>"]);
    let text = "a ab ü日🎉";
    for reply in replies(&model, &OutputFormat::Choice(vec![text.into()]), 6) {
        assert_eq!(text, reply);
    }
    for reply in replies(&model, &OutputFormat::json(json!({"type": "string", "maxLength": 6})), 6) {
        assert!(serde_json::from_str::<String>(&reply).expect("a string").chars().count() <= 6);
    }
}
