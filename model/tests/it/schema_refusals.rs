//! JSON schemas that are refused with keyword and path instead of being followed
//! with a rounded number.

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

/// The compiler uses f64, which would round each of these numbers.
#[test]
fn integers_beyond_the_precision_of_f64_are_refused() {
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
        assert!(
            !format!("{error} {error:?}").contains("id"),
            "errors do not show a caller's property name: {error} {error:?}"
        );
    }
    // The largest exact number is kept to the last digit. Annotations are not checked.
    let kept = json!({"const": beyond - 1, "default": beyond, "$defs": {"unused": {"const": beyond}}});
    let grammar = compiler().compile(&OutputFormat::json(kept)).expect("the schema is within the limit");
    let follows = |text: &str| {
        let ids = small_tokenizer().encode_plain(text).expect("the text encodes");
        grammar.allowed(&ids).is_ok_and(|allowed| allowed.contains(end(&small_tokenizer())))
    };
    assert_eq!((follows("9007199254740992"), follows("9007199254740993")), (true, false));
}

#[test]
fn unsupported_schema_keywords_are_refused_with_their_place() {
    let schemas = [
        (
            json!({"properties": {"secret": {"items": {"contains": {}}}}}),
            "contains",
            "#/properties/secret/items",
            "#/properties/*/items",
        ),
        (
            json!({"$schema": "http://json-schema.org/draft-07/schema#", "dependentRequired": {}}),
            "dependentRequired",
            "#",
            "#",
        ),
        (
            json!({"patternProperties": {"^s": {"not": {"const": 1}}}}),
            "not",
            "#/patternProperties/^s",
            "#/patternProperties/*",
        ),
    ];
    for (schema, expected, path, shown) in schemas {
        let error = compiler().compile(&OutputFormat::json(schema)).expect_err(expected);
        let GrammarError::Keyword { keyword, place } = &error else { panic!("{error:?}") };
        assert_eq!((*keyword, place.path()), (expected, path));
        assert!(error.to_string().contains(&format!("`{expected}` at {shown},")), "{error}");
    }
    // A property may have the name of a keyword, and a format of numbers is an annotation. Each
    // known format is followed.
    let names = json!({"type": "object", "properties": {"not": {"type": "integer", "format": "int64", "maximum": 9}},
        "required": ["not"], "additionalProperties": false});
    compiler().compile(&OutputFormat::json(names)).expect("the grammar compiles");
    for format in
        ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"]
    {
        let schema = json!({"type": "string", "format": format});
        compiler().compile(&OutputFormat::json(schema)).expect(format);
    }
}

/// Schemas that Pydantic 2 and Zod 4 write for everyday types, with values that a reply may have
/// and values that it may not have.
#[test]
fn schemas_of_pydantic_and_zod_are_followed() {
    let text = json!({"type": "string"});
    let decimal =
        json!({"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]});
    let email = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$";
    let members = json!({"properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false});
    let cases = [
        (decimal, vec!["1.5", r#""-1.5""#, r#""+.5""#], vec![r#""""#, r#""-.""#, r#""1,5""#]),
        (
            json!({"type": "string", "format": "email", "pattern": email}),
            vec![r#""a.b@c.de""#],
            vec![r#"".a@c.de""#, r#""a..b@c.de""#],
        ),
        (
            json!({"type": "array", "items": {"type": "integer"}, "uniqueItems": true}),
            vec!["[1,2]", "[1,1]"],
            vec!["1"],
        ),
        (
            json!({"type": "object", "propertyNames": text, "additionalProperties": {"type": "boolean"}}),
            vec![r#"{"x":true}"#, "{}"],
            vec![r#"{"x":1}"#],
        ),
        (
            json!({"type": "object", "propertyNames": {"type": "string", "enum": ["on", "off"]},
                "additionalProperties": {"type": "integer"}, "required": ["on", "off"]}),
            vec![r#"{"on":1,"off":2}"#],
            vec![r#"{"on":1}"#, r#"{"on":1,"off":2,"x":3}"#],
        ),
        (json!({"type": "string", "format": "path"}), vec![r#""/tmp""#], vec!["1"]),
        (json!({"type": "string", "format": "json-pointer"}), vec![r#""/a""#], vec!["1"]),
        (json!({"type": "string", "format": "uuid7"}), vec![], vec![r#""7""#]),
        (json!({"oneOf": [{"type": "integer"}, {"type": "number"}]}), vec!["1", "1.5"], vec!["true"]),
        (members, vec![r#"{"a":true}"#], vec!["true", r#""a""#, "[]"]),
        (
            json!({"type": "object", "properties": {"a": text, "never": {"not": {}}}, "required": ["a"],
                "additionalProperties": false}),
            vec![r#"{"a":"x"}"#],
            vec![r#"{"a":"x","never":1}"#],
        ),
    ];
    for (schema, good, bad) in cases {
        let grammar = compiler().compile(&OutputFormat::json(schema.clone()));
        let grammar = grammar.unwrap_or_else(|error| panic!("{schema}: {error} {:?}", error.reason()));
        let follows = |reply: &str| {
            let ids = small_tokenizer().encode_plain(reply).expect("the text encodes");
            grammar.allowed(&ids).is_ok_and(|allowed| allowed.contains(end(&small_tokenizer())))
        };
        good.iter().for_each(|reply| assert!(follows(reply), "{schema} should allow {reply}"));
        bad.iter().for_each(|reply| assert!(!follows(reply), "{schema} should refuse {reply}"));
    }
}
