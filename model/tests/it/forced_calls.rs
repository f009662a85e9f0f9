//! Forms of whole replies: calls that a model must make, and reasoning before any form.

use bursar_model::error::{GrammarError, ReplyFormError};
use bursar_model::sampling::{ForcedCalls, Grammar, OutputFormat, ReplyForm, SamplingParams};
use bursar_model::text::{CallableTool, ReplyParser, ReplyPart, Thinking, ToolFormat};
use serde_json::{Value, json};

use crate::structured_output::{Model, QWEN, models, reply};

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
fn with_any_logits_a_forced_reply_is_calls_of_the_tools() {
    for (model, count) in models().into_iter().zip([24, 24, 6]) {
        for (format, is_parallel) in
            [(ToolFormat::Hermes, false), (ToolFormat::Hermes, true), (ToolFormat::Llama3Json, true)]
        {
            let grammar = grammar(model, &ReplyForm::Calls(calls(format, is_parallel)), Thinking::Off);
            let mut all = Vec::new();
            for seed in 0..count {
                let temperature = if seed % 2 == 0 { 0.0 } else { 4.0 };
                let params = SamplingParams { temperature, seed, ..Default::default() };
                let (produced, ended) = reply(model, &grammar, params, 4_000);
                assert!(ended, "{}: {format:?}", model.name);
                let calls = read(format, &model.tokenizer.decode(&produced, false).expect("it decodes"));
                assert!((1..=16).contains(&calls.len()), "{}: {calls:?}", model.name);
                assert!(calls.len() == 1 || (is_parallel && format == ToolFormat::Hermes));
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
            assert_eq!(several, is_parallel && format == ToolFormat::Hermes, "{}: {all:?}", model.name);
            assert!(all.iter().flatten().any(|(name, _)| name != "get_weather"), "each tool may be called");
        }
    }
}

/// Whether the grammar allows `text`, token by token, and then the end.
fn allows(model: &Model, grammar: &Grammar, text: &str) -> bool {
    // The tags are separate tokens, as a model writes them.
    let tokens = model.tokenizer.encode(text, false).expect("it encodes");
    let follows = |at: usize, next: u32| grammar.allowed(&tokens[..at]).expect("it follows").contains(next);
    (0..tokens.len()).all(|at| follows(at, tokens[at])) && follows(tokens.len(), model.ends[0])
}

#[test]
fn reasoning_comes_before_the_form() {
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
        (call, Thinking::Possible, [true, true, false]),
        ("42", Thinking::Possible, [false, true, true]),
        (&format!("<think>\n{thought}42"), Thinking::Possible, [false, true, true]),
        (&format!("<think>\n{thought}{call}\n{call}"), Thinking::Possible, [true, true, false]),
        (&format!("{thought}{call}"), Thinking::Begun, [true, true, false]),
        (&format!("{thought}42"), Thinking::Begun, [false, true, true]),
        (call, Thinking::Begun, [false; 3]),
    ];
    for (text, thinking, expected) in rows {
        for (form, expected) in forms.iter().zip(expected) {
            let grammar = grammar(&QWEN, form, thinking);
            assert_eq!(allows(&QWEN, &grammar, text), expected, "{text} {thinking:?} {form:?}");
        }
    }
}

#[test]
fn a_tool_whose_schema_cannot_be_followed_is_named_by_its_index() {
    let refused = |tools: Vec<CallableTool>, format| {
        let form = ReplyForm::Calls(ForcedCalls { format, tools, is_parallel: false });
        QWEN.compiler.compile_reply(&form, Thinking::Off).expect_err("it is refused")
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
    assert!(error.reason().expect("it says why").contains("/properties/a"), "{error:?}");
    assert!(!format!("{error} {faulty:?}").contains("zebra"), "nothing of the schema is shown");
    faulty[1].parameters = json!({"type": "object", "properties": {"a": {"multipleOf": 1e9}}});
    let ReplyFormError { tool, source } = refused(faulty.clone(), ToolFormat::Hermes);
    assert_eq!((tool, source.reason()), (Some(1), Some("`multipleOf` is above 100000000, at #/properties/a")));
    assert_eq!(refused(Vec::new(), ToolFormat::Hermes), GrammarError::NoChoice.into());
}

#[test]
fn a_limit_that_the_tools_exceed_together_refuses_them_without_a_look_at_each() {
    let refused = |tools: Vec<CallableTool>| {
        let form = ReplyForm::Calls(ForcedCalls { format: ToolFormat::Hermes, tools, is_parallel: false });
        QWEN.compiler.compile_reply(&form, Thinking::Off).expect_err("it is refused")
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
