//! JSON schemas that are refused, with keyword and place, and never followed with a rounded number.

use bursar_budgets::Hint;
use bursar_model::error::GrammarError;
use bursar_model::sampling::{GrammarCompiler, OutputFormat};
use bursar_model::text::Tokenizer;
use serde_json::json;

use crate::common::small_tokenizer;

fn end(tokenizer: &Tokenizer) -> u32 {
    tokenizer.id_of("<|im_end|>").expect("an end token")
}

fn compiler() -> GrammarCompiler {
    let tokenizer = small_tokenizer();
    GrammarCompiler::new(&tokenizer, 384, &[end(&tokenizer)]).expect("a byte-level vocabulary")
}

/// The compiler uses f64, which would round each of these.
#[test]
fn integers_beyond_what_a_float_keeps_are_refused_with_keyword_and_place() {
    let beyond = (1u64 << 53) + 1;
    let schemas = [
        (json!({"const": beyond}), "const", "#"),
        (json!({"properties": {"id": {"enum": [1, {"deep": [beyond]}]}}}), "enum", "#/properties/id"),
        (json!({"items": {"type": "integer", "minimum": -(beyond as i64)}}), "minimum", "#/items"),
        (json!({"anyOf": [{}, {"maximum": u64::MAX}]}), "maximum", "#/anyOf/1"),
        (json!({"$ref": "#/$defs/a", "$defs": {"a": {"exclusiveMaximum": 1e16}}}), "exclusiveMaximum", "#/$defs/a"),
    ];
    for (schema, expected, path) in schemas {
        let error = compiler().compile(&OutputFormat::json(schema)).expect_err(expected);
        let GrammarError::Number { keyword, place } = &error else { panic!("{error:?}") };
        assert_eq!((*keyword, place.path()), (expected, path));
        assert!(error.to_string().contains("2^53") && !error.hint().is_empty(), "{error}");
        assert!(!format!("{error} {error:?}").contains("id"), "a property's name is the caller's: {error} {error:?}");
    }
    // The largest exact number is kept to the last digit. Annotations are not checked.
    let kept = json!({"const": beyond - 1, "default": beyond, "$defs": {"unused": {"const": beyond}}});
    let grammar = compiler().compile(&OutputFormat::json(kept)).expect("it is within the limit");
    let follows = |text: &str| {
        let ids = small_tokenizer().encode_plain(text).expect("it encodes");
        grammar.allowed(&ids).is_ok_and(|allowed| allowed.contains(end(&small_tokenizer())))
    };
    assert_eq!((follows("9007199254740992"), follows("9007199254740993")), (true, false));
}

#[test]
fn keywords_that_the_compiler_lacks_are_refused_with_their_place() {
    let schemas = [
        (
            json!({"properties": {"secret": {"items": {"uniqueItems": true}}}}),
            "uniqueItems",
            "#/properties/secret/items",
            "#/properties/*/items",
        ),
        (
            json!({"$schema": "http://json-schema.org/draft-07/schema#", "dependentRequired": {}}),
            "dependentRequired",
            "#",
            "#",
        ),
        (json!({"allOf": [{"type": "string", "format": "colour"}]}), "format", "#/allOf/0", "#/allOf/0"),
        (json!({"patternProperties": {"^s": {"not": {}}}}), "not", "#/patternProperties/^s", "#/patternProperties/*"),
    ];
    for (schema, expected, path, shown) in schemas {
        let error = compiler().compile(&OutputFormat::json(schema)).expect_err(expected);
        let GrammarError::Keyword { keyword, place } = &error else { panic!("{error:?}") };
        assert_eq!((*keyword, place.path()), (expected, path));
        assert!(error.to_string().contains(&format!("`{expected}` at {shown},")), "{error}");
    }
    // A property may have the name of a keyword, and a format of numbers is an annotation. Each known format is
    // followed.
    let names = json!({"type": "object", "properties": {"not": {"type": "integer", "format": "int64", "maximum": 9}},
        "required": ["not"], "additionalProperties": false});
    compiler().compile(&OutputFormat::json(names)).expect("it can be followed");
    for format in
        ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"]
    {
        let schema = json!({"type": "string", "format": format});
        compiler().compile(&OutputFormat::json(schema)).expect(format);
    }
}
