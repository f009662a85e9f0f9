//! Forms of complete replies (`ReplyForm`): calls that a model must make, and reasoning before any
//! form.

use bursar_budgets::Hint;
use bursar_model::error::{GrammarError, ReplyFormError};
use bursar_model::sampling::{ForcedCalls, Grammar, OutputFormat, ReplyForm, SamplingParams};
use bursar_model::text::{CallableTool, ReasoningTags, ReplyParser, ReplyPart, Thinking, ToolFormat};
use serde_json::{Value, json};

use crate::structured_output::{Model, QWEN, models, reply};

const POSSIBLE: Thinking = Thinking::Possible(ReasoningTags::THINK);
const BEGUN: Thinking = Thinking::Begun(ReasoningTags::THINK);

fn tools() -> Vec<CallableTool> {
    let tool = |name: &str, parameters| CallableTool { name: name.to_owned(), parameters };
    vec![
        tool(
            "get_weather",
            json!({
                // Even without `type`, arguments are an object.
                "properties": {"place": {"$ref": "#/$defs/place"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
                "required": ["place", "days"], "additionalProperties": false,
                "$defs": {"place": {"enum": ["Zürich", "a \"}</tool_call>"]}},
            }),
        ),
        // The definitions in this schema must not collide with the definitions of another tool.
        tool(
            "odd \"name\" /}",
            json!({"type": "object", "properties": {"x": {"$ref": "#/$defs/place"}}, "required": ["x"],
                   "additionalProperties": false, "$defs": {"place": {"type": "boolean"}}}),
        ),
    ]
}

fn calls(format: ToolFormat, is_parallel: bool) -> ForcedCalls {
    ForcedCalls { format, tools: tools(), is_parallel }
}

fn grammar(model: &Model, form: &ReplyForm, thinking: Thinking) -> Grammar {
    model.compiler.compile_reply(form, thinking).unwrap_or_else(|error| panic!("{}: {error:?}", model.name))
}

/// Names and arguments of the calls in a reply that contains nothing else.
fn read(format: ToolFormat, reply: &str) -> Vec<(String, Value)> {
    let mut parser = ReplyParser::new(Thinking::Off, format, tools());
    let mut parts = parser.feed(reply);
    parts.extend(parser.finish());
    let mut calls = Vec::new();
    for part in parts {
        match part {
            ReplyPart::CallBegin { name, .. } => calls.push((name, Value::Null)),
            ReplyPart::Arguments { json, .. } => {
                calls.last_mut().expect("a call").1 = serde_json::from_str(&json).expect("arguments are JSON");
            }
            ReplyPart::CallEnd { is_closed } => assert!(is_closed),
            ReplyPart::Markup(_) => {}
            other => panic!("{other:?} in {reply}"),
        }
    }
    calls
}

#[test]
fn a_forced_reply_consists_of_valid_tool_calls() {
    for (model, count) in models().into_iter().zip([24, 24, 6]) {
        let tagged = [ToolFormat::Hermes, ToolFormat::QwenXml];
        let formats = tagged.map(|format| [(format, false), (format, true)]).concat();
        for (format, is_parallel) in formats.into_iter().chain([(ToolFormat::Llama3Json, true)]) {
            let grammar = grammar(model, &ReplyForm::Calls(calls(format, is_parallel)), Thinking::Off);
            let mut all = Vec::new();
            for seed in 0..count {
                let temperature = if seed % 2 == 0 { 0.0 } else { 4.0 };
                let params = SamplingParams { temperature, seed, ..Default::default() };
                let (produced, ended) = reply(model, &grammar, params, 4_000);
                assert!(ended, "{}: {format:?}", model.name);
                let calls = read(format, &model.tokenizer.decode(&produced, false).expect("the tokens decode"));
                assert!((1..=16).contains(&calls.len()), "{}: {calls:?}", model.name);
                assert!(calls.len() == 1 || (is_parallel && tagged.contains(&format)));
                all.push(calls);
            }
            for (name, arguments) in all.iter().flatten() {
                assert!(
                    arguments["days"].is_i64() && arguments["place"].is_string() && name == "get_weather"
                        || arguments["x"].is_boolean() && name == "odd \"name\" /}",
                    "{name} {arguments}"
                );
            }
            let several = all.iter().any(|calls| calls.len() > 1);
            assert_eq!(several, is_parallel && tagged.contains(&format), "{}: {all:?}", model.name);
            assert!(all.iter().flatten().any(|(name, _)| name != "get_weather"), "each tool may be called");
        }
    }
}

/// Whether the grammar allows `text`, token by token, and then the end.
fn allows(model: &Model, grammar: &Grammar, text: &str) -> bool {
    // The tags are separate tokens, as a model writes them.
    let tokens = model.tokenizer.encode(text, false).expect("the text encodes");
    let follows = |at: usize, next: u32| grammar.allowed(&tokens[..at]).expect("the token follows").contains(next);
    (0..tokens.len()).all(|at| follows(at, tokens[at])) && follows(tokens.len(), model.ends[0])
}

#[test]
fn a_grammar_allows_reasoning_before_the_constrained_reply() {
    let call =
        "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"place\": \"Zürich\", \"days\": 2}}\n</tool_call>";
    let (forced, digits) = (calls(ToolFormat::Hermes, true), OutputFormat::Regex("[0-9]+".into()));
    let forms =
        [ReplyForm::Calls(forced.clone()), ReplyForm::FormatOrCalls(digits.clone(), forced), ReplyForm::Format(digits)];
    let thought = "Hm, <b> 1.\n\n2. <tool_call>?\n</think>\n\n";
    let rows: [(&str, Thinking, [bool; 3]); 10] = [
        (call, Thinking::Off, [true, true, false]),
        ("42", Thinking::Off, [false, true, true]),
        ("<think>\nHm.\n</think>\n\n42", Thinking::Off, [false; 3]),
        (call, POSSIBLE, [true, true, false]),
        ("42", POSSIBLE, [false, true, true]),
        (&format!("<think>\n{thought}42"), POSSIBLE, [false, true, true]),
        (&format!("<think>\n{thought}{call}\n{call}"), POSSIBLE, [true, true, false]),
        (&format!("{thought}{call}"), BEGUN, [true, true, false]),
        (&format!("{thought}42"), BEGUN, [false, true, true]),
        (call, BEGUN, [false; 3]),
    ];
    for (text, thinking, expected) in rows {
        for (form, expected) in forms.iter().zip(expected) {
            let grammar = grammar(&QWEN, form, thinking);
            assert_eq!(allows(&QWEN, &grammar, text), expected, "{text} {thinking:?} {form:?}");
        }
    }
}

/// The grammar of calls of one tool in XML.
fn xml(parameters: Value) -> (ReplyForm, Grammar) {
    let tools = vec![CallableTool { name: "f".into(), parameters }];
    let form = ReplyForm::Calls(ForcedCalls { format: ToolFormat::QwenXml, tools, is_parallel: false });
    let grammar = grammar(&QWEN, &form, Thinking::Off);
    (form, grammar)
}

/// A call of `f` in XML.
fn call_of(parameters: &[(&str, &str)]) -> String {
    let parameters = parameters.iter().map(|(name, value)| format!("<parameter={name}>\n{value}\n</parameter>\n"));
    format!("<tool_call>\n<function=f>\n{}</function>\n</tool_call>", parameters.collect::<String>())
}

#[test]
fn an_xml_parameter_value_follows_its_schema() {
    for (schema, right, wrong) in [
        (json!({}), &["", "3", "a\n\n<b>"][..], &["a\n</parameter>\nb", "a</function></tool_call>"][..]),
        (json!({"type": "string", "minLength": 2, "maxLength": 3}), &["ab", "日本語", "a\n\n"], &["a", "abcd"]),
        (json!({"type": "string", "pattern": "^[A-Z]{2}/\\d$"}), &["AB/1"], &["ab/1", "AB/1\n", "xAB/1", "AB/١"]),
        (json!({"type": "string", "pattern": "^https?://"}), &["http://", "https://a\nb"], &["", "ftp://"]),
        (json!({"type": "string", "minLength": 1, "maxLength": 5000}), &["a"], &[""]),
        (
            json!({"type": "string", "pattern": "^[a-z]+@[a-z]+$", "minLength": 5, "maxLength": 32}),
            &["abc@def"],
            &["a@b"],
        ),
        (json!({"enum": ["a b", 3, true, null]}), &["a b", "3", "true", "null"], &["a", "\"a b\"", "False"]),
        (json!({"$ref": "#/$defs/color"}), &["red", "green"], &["blue", "\"red\""]),
        (json!({"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]}), &["red", "null"], &["none", "blue"]),
        (json!({"allOf": [{"const": "x"}], "description": "d"}), &["x"], &["y"]),
        (json!({"anyOf": [{"type": "string"}, {"enum": ["x"]}]}), &["x", "any", "null"], &[]),
        (json!({"type": "integer", "minimum": 1, "maximum": 12}), &["1", "12"], &["0", "13", "1.5", "\"1\"", " 1"]),
        (json!({"type": "boolean"}), &["true"], &["True", "yes"]),
        (json!({"type": ["string", "integer"], "maxLength": 2}), &["12", "ab", "123"], &["abc"]),
        (
            json!({"type": "array", "items": {"$ref": "#/$defs/color"}}),
            &["[]", "[\"red\", \"green\"]"],
            &["red", "[\"blue\"]"],
        ),
        (
            json!({"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": false}),
            &["{}", "{\"a\": \"</parameter>\"}"],
            &["{\"b\": 1}", "a"],
        ),
    ] {
        let parameters = json!({"properties": {"x": schema}, "required": ["x"], "additionalProperties": false,
            "$defs": {"color": {"enum": ["red", "green"]}}});
        let (_, grammar) = xml(parameters.clone());
        for (values, expected) in [(right, true), (wrong, false)] {
            for value in values {
                assert_eq!(allows(&QWEN, &grammar, &call_of(&[("x", value)])), expected, "{value:?} for {schema}");
            }
        }
    }
}

#[test]
fn xml_parameters_follow_the_order_of_the_schema() {
    let integer = json!({"type": "integer"});
    let named = json!({"a": integer, "b": integer, "c": false});
    let (_, closed) = xml(json!({"properties": named, "required": ["b"], "additionalProperties": false}));
    let (_, open) = xml(json!({"properties": named, "required": ["b"], "additionalProperties": integer}));
    let (_, any) = xml(json!({"type": "object"}));
    let (a, b, other) = (("a", "1"), ("b", "2"), ("a b", "3"));
    for (parameters, expected) in [
        (&[a, b][..], [true, true, true]),
        (&[b], [true, true, true]),
        (&[a], [false, false, true]),
        (&[b, a], [false, false, true]),
        (&[b, ("c", "1")], [false, false, true]),
        (&[b, other], [false, true, true]),
        (&[b, ("d", "text")], [false, false, true]),
        (&[], [false, false, true]),
    ] {
        let found = [&closed, &open, &any].map(|grammar| allows(&QWEN, grammar, &call_of(parameters)));
        assert_eq!(found, expected, "{parameters:?}");
    }
}

#[test]
fn unenforced_xml_call_keywords_are_reported_or_refused() {
    let (form, _) = xml(json!({
        "properties": {"day": {"type": "string", "format": "date", "maxLength": 33}, "word": {"type": "string", "pattern": "x$"},
            "code": {"type": "string", "pattern": "^(?!a)b$"}},
        "oneOf": [{"required": ["day"]}, {"required": ["word"]}],
    }));
    let mut left: Vec<String> = form.not_followed().iter().map(ToString::to_string).collect();
    left.sort();
    let of_parameters =
        ["`format`", "`maxLength`", "`pattern`", "`pattern`"].map(|keyword| format!("{keyword} at #/properties/*"));
    let mut expected = [&of_parameters[..], &["`oneOf` at #".to_owned(), "`oneOf` at #".to_owned()]].concat();
    expected.sort();
    assert_eq!(left, expected);
    let refused = |name: &str, parameters| {
        let tools = vec![tools()[0].clone(), CallableTool { name: name.to_owned(), parameters }];
        let form = ReplyForm::Calls(ForcedCalls { format: ToolFormat::QwenXml, tools, is_parallel: false });
        QWEN.compiler.compile_reply(&form, Thinking::Off).err()
    };
    let many: serde_json::Map<_, _> = (0..129).map(|index| (index.to_string(), json!({}))).collect();
    for (name, parameters) in [
        ("a>b", json!({})),
        ("f", json!({"properties": {"a\nb": {}}})),
        ("f", json!({"properties": {"a": false}, "required": ["a"]})),
        ("f", json!({"properties": many})),
        ("f", json!({"properties": {"a": {"type": "string", "not": {"const": "b"}}}})),
        ("f", json!({"properties": {"a": {"type": "zebra"}}})),
        ("f", json!({"properties": {"a": {"type": "integer", "minimum": 5, "maximum": 1}}, "required": ["a"]})),
    ] {
        let Some(ReplyFormError { tool, source }) = refused(name, parameters.clone()) else { panic!("{parameters}") };
        assert_eq!(tool, Some(1), "{parameters} {source:?}");
        assert!(!source.hint().is_empty() && !source.to_string().contains("zebra"));
    }
}

#[test]
fn a_tool_with_an_unsupported_schema_is_named_by_index() {
    let refused = |tools: Vec<CallableTool>, format| {
        let form = ReplyForm::Calls(ForcedCalls { format, tools, is_parallel: false });
        QWEN.compiler.compile_reply(&form, Thinking::Off).expect_err("the forced call is refused")
    };
    let mut faulty = tools();
    faulty[1].parameters = json!({"type": "object", "not": {"required": ["a"]}});
    assert!(matches!(
        refused(faulty.clone(), ToolFormat::Hermes),
        ReplyFormError { tool: Some(1), source: GrammarError::Keyword { keyword: "not", .. } }
    ));
    faulty[1].parameters = json!({"type": "object", "properties": {"a": {"type": "zebra"}}});
    let ReplyFormError { tool, source: error } = refused(faulty.clone(), ToolFormat::Llama3Json);
    assert_eq!(tool, Some(1));
    assert!(error.reason().expect("the error has a reason").contains("/properties/a"), "{error:?}");
    assert!(!format!("{error} {faulty:?}").contains("zebra"), "the error does not show the schema");
    faulty[1].parameters = json!({"type": "object", "properties": {"a": {"multipleOf": 1e9}}});
    let ReplyFormError { tool, source } = refused(faulty.clone(), ToolFormat::Hermes);
    assert_eq!((tool, source.reason()), (Some(1), Some("`multipleOf` is above 100000000, at #/properties/a")));
    assert_eq!(refused(Vec::new(), ToolFormat::Hermes), GrammarError::NoChoice.into());
}

#[test]
fn tools_over_a_total_limit_are_refused_without_compiling_any() {
    let refused = |tools: Vec<CallableTool>| {
        let form = ReplyForm::Calls(ForcedCalls { format: ToolFormat::Hermes, tools, is_parallel: false });
        QWEN.compiler.compile_reply(&form, Thinking::Off).expect_err("the forced call is refused")
    };
    // `zebra` has an invalid schema. An error that names this tool would show that
    // its schema was compiled.
    let zebra = CallableTool { name: "zebra".into(), parameters: json!({"type": "zebra"}) };
    let many = |tool: CallableTool, count| [vec![tool; count], vec![zebra.clone()]].concat();
    let ReplyFormError { tool, source } = refused(many(tools()[0].clone(), 128));
    assert!(matches!((tool, &source), (None, GrammarError::TooLarge { value: 129, limit: 128, .. })), "{source}");
    let long = CallableTool { name: "long".into(), parameters: json!({"description": "a".repeat(60_000)}) };
    let ReplyFormError { tool, source } = refused(many(long, 5));
    assert!(matches!((tool, &source), (None, GrammarError::TooLarge { unit: "bytes of schemas", .. })), "{source}");
}

#[test]
fn calls_of_gemma_4_cannot_be_forced() {
    let form = ReplyForm::Calls(calls(ToolFormat::Gemma4, false));
    let error = QWEN.compiler.compile_reply(&form, Thinking::Off).expect_err("the forced call is refused").source;
    assert_eq!(error, GrammarError::CallFormat);
    assert!(error.hint().contains("tool choice"));
}

#[test]
fn reasoning_between_special_tokens_cannot_precede_a_form() {
    let form = ReplyForm::Format(OutputFormat::Regex("[0-9]+".into()));
    let compile = |thinking| QWEN.compiler.compile_reply(&form, thinking);
    let error = compile(Thinking::Begun(ReasoningTags::CHANNEL)).expect_err("the reasoning is open").source;
    assert_eq!(error, GrammarError::OpenReasoning);
    assert!(error.hint().contains("reasoning_effort"));
    let grammar = compile(Thinking::Possible(ReasoningTags::CHANNEL)).expect("the form is accepted");
    let allowed = |grammar: &Grammar| grammar.allowed(&[]).expect("a digit is allowed").ids();
    assert_eq!(allowed(&grammar), allowed(&compile(Thinking::Off).expect("the form is accepted")));
}
