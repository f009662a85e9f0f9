//! Parts of a reply (reasoning, text and calls), in whatever pieces the text arrives.

use bursar_model::text::{CallableTool, ReasoningTags, ReplyParser, ReplyPart, Thinking, ToolFormat};
use proptest::prelude::*;
use serde_json::{Value, json};

const POSSIBLE: Thinking = Thinking::Possible(ReasoningTags::THINK);
const BEGUN: Thinking = Thinking::Begun(ReasoningTags::THINK);

const CHANNEL: [Thinking; 2] = [Thinking::Possible(ReasoningTags::CHANNEL), Thinking::Begun(ReasoningTags::CHANNEL)];

/// The parameters of each tool.
fn schema() -> Value {
    json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}, "share": {"type": "number"},
        "list": {"type": "array"}, "more": {"$ref": "#/$defs/more"}, "any": {}, "id": {"type": ["string", "integer"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "zone": {"enum": ["utc", 0]},
    }, "$defs": {"more": {"type": "object"}}})
}

fn parser(thinking: Thinking, tools: ToolFormat) -> ReplyParser {
    let names = ["weather", "ping", "a\"b"].map(str::to_owned);
    ReplyParser::new(thinking, tools, names.map(|name| CallableTool { name, parameters: schema() }))
}

/// Joins adjacent parts of one kind, as a reader of the stream does.
fn joined(parts: impl IntoIterator<Item = ReplyPart>) -> Vec<ReplyPart> {
    let mut whole: Vec<ReplyPart> = Vec::new();
    for part in parts {
        match (whole.last_mut(), part) {
            (Some(ReplyPart::Text(last)), ReplyPart::Text(more))
            | (Some(ReplyPart::Reasoning(last)), ReplyPart::Reasoning(more))
            | (Some(ReplyPart::Markup(last)), ReplyPart::Markup(more)) => last.push_str(&more),
            (Some(ReplyPart::Arguments { json, written }), ReplyPart::Arguments { json: more, written: text }) => {
                json.push_str(&more);
                written.push_str(&text);
            }
            (_, part) => whole.push(part),
        }
    }
    whole
}

fn read<'a>(mut parser: ReplyParser, pieces: impl IntoIterator<Item = &'a str>) -> Vec<ReplyPart> {
    let mut parts: Vec<_> = pieces.into_iter().flat_map(|piece| parser.feed(piece)).collect();
    parts.extend(parser.finish());
    joined(parts)
}

/// A short notation of the parts that a reader of the reply gets.
fn described(thinking: Thinking, tools: ToolFormat, reply: &str) -> String {
    let parts = read(parser(thinking, tools), [reply]);
    assert_eq!(parts.iter().map(ReplyPart::text).collect::<String>(), reply, "no text of the reply is lost");
    let mut described = String::new();
    for part in parts {
        described += &match part {
            ReplyPart::Text(text) => format!("[{text}]"),
            ReplyPart::Reasoning(text) => format!("({text})"),
            ReplyPart::CallBegin { index, name } => format!("{index} {name} "),
            ReplyPart::Arguments { json, .. } => json,
            ReplyPart::CallEnd { is_closed } => if is_closed { "." } else { "!" }.to_owned(),
            ReplyPart::Markup(_) => continue,
        };
    }
    described
}

fn hermes(reply: &str) -> String {
    described(Thinking::Off, ToolFormat::Hermes, reply)
}

fn llama(reply: &str) -> String {
    described(Thinking::Off, ToolFormat::Llama3Json, reply)
}

fn xml(reply: &str) -> String {
    described(Thinking::Off, ToolFormat::QwenXml, reply)
}

fn gemma(reply: &str) -> String {
    described(Thinking::Off, ToolFormat::Gemma4, reply)
}

/// Checks the name and the arguments that a parser returns for each piece of a reply.
fn assert_streams(tools: ToolFormat, pieces: &[(&str, &str)]) {
    let mut parser = parser(Thinking::Off, tools);
    for (piece, expected) in pieces {
        let returned = parser.feed(piece).into_iter().map(|part| match part {
            ReplyPart::Arguments { json, .. } => json,
            ReplyPart::CallBegin { name, .. } => name,
            _ => String::new(),
        });
        assert_eq!(returned.collect::<String>(), *expected, "{piece:?}");
    }
}

/// A call of `weather` in XML.
fn call_of(parameters: &[(&str, &str)]) -> String {
    let parameters = parameters.iter().map(|(name, value)| format!("<parameter={name}>\n{value}\n</parameter>\n"));
    format!("<tool_call>\n<function=weather>\n{}</function>\n</tool_call>", parameters.collect::<String>())
}

#[test]
fn calls_are_recognized_before_between_and_after_text() {
    let call = |name: &str| format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {{\"x\": 1}}}}\n</tool_call>");
    assert_eq!(hermes(&call("weather")), r#"0 weather {"x": 1}."#);
    assert_eq!(hermes(&format!("{}\n{}\n", call("a"), call("b"))), r#"0 a {"x": 1}.1 b {"x": 1}."#);
    let around = format!("Let me see.\n\n{}\nAnd\n{}\n\nDone.\n", call("a"), call("b"));
    assert_eq!(hermes(&around), "[Let me see.]0 a {\"x\": 1}.[\nAnd]1 b {\"x\": 1}.[\n\nDone.\n]");
}

#[test]
fn arguments_may_hold_braces_quotes_and_tags() {
    let hard = r#"{"a": {"b": [{}, "}}"]}, "c": "\"}\\", "d": "</tool_call><tool_call>"}"#;
    let reply = format!("<tool_call>{{\"name\":\"weather\",\"arguments\":{hard}}}</tool_call>");
    assert_eq!(hermes(&reply), format!("0 weather {hard}."));
    assert_eq!(llama(&format!("{{\"name\": \"weather\", \"parameters\": {hard}}}")), format!("0 weather {hard}."));
}

#[test]
fn the_members_of_a_call_may_be_in_any_order() {
    let reply =
        r#"<tool_call> {"id": [1, {"name": 2}], "arguments": {"x": "y"}, "name": "a\"b", "more": null} </tool_call>"#;
    assert_eq!(hermes(reply), r#"0 a"b {"x": "y"}."#);
    assert_eq!(hermes("<tool_call>{\"name\": \"ping\"}</tool_call>"), "0 ping .");
}

#[test]
fn malformed_calls_are_text() {
    for reply in [
        "<tool_call>",
        "<tool_call>\nnot JSON\n</tool_call>",
        "<tool_call>{\"name\": \"\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"weather\", \"arguments\": \"{}\"}</tool_call>",
        "<tool_call>{\"name\": 5, \"arguments\": {}}</tool_call>",
        "<tool_call>{\"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"wea",
        "a <b> <tool_calls> <tool_call",
        "</tool_call>\n\n<\n",
    ] {
        assert_eq!(hermes(reply), format!("[{reply}]"));
    }
}

#[test]
fn a_truncated_call_is_closed_and_later_text_is_kept() {
    let head = "<tool_call>\n{\"name\": \"weather\", \"arguments\": ";
    assert_eq!(hermes(&format!("{head}{{\"x\": [1")), "0 weather {\"x\": [1!");
    assert_eq!(hermes(&format!("{head}{{\"x\": 1\n</tool_call>\nOh.")), "0 weather {\"x\": 1\n![\nOh.]");
    // A missing closing brace or tag does not break the call.
    assert_eq!(hermes(&format!("{head}{{\"x\": 1}}\n</tool_call>")), "0 weather {\"x\": 1}.");
    assert_eq!(hermes(&format!("{head}{{}}}}\n{head}{{}}}}")), "0 weather {}.1 weather {}.");
    assert_eq!(hermes(&format!("{head}{{}}}} so")), "0 weather {}.[ so]");
}

#[test]
fn untagged_json_is_a_call_only_at_the_beginning() {
    let call = r#"{"name": "weather", "parameters": {"x": 1}}"#;
    assert_eq!(llama(call), r#"0 weather {"x": 1}."#);
    assert_eq!(llama(&format!("\n<|python_tag|>{call}; {call}\n")), r#"0 weather {"x": 1}.1 weather {"x": 1}."#);
    assert_eq!(llama(&format!("Now: <|python_tag|>{call} ok")), r#"[Now: ]0 weather {"x": 1}.[ ok]"#);
    for text in [
        &format!("Now: {call}"),
        r#"{"name": "somebody", "parameters": {}}"#,
        r#"{"name": "weather", "age": 5}"#,
        r#"{"name": "weather"}"#,
        "<|python_tag|>brave_search.call(query=\"x\")",
        "<|python_tag|>",
        " {",
    ] {
        assert_eq!(llama(text), format!("[{text}]"));
    }
}

#[test]
fn xml_parameters_become_one_json_object() {
    assert_eq!(xml(&call_of(&[("city", "Paris"), ("days", "3")])), r#"0 weather {"city": "Paris", "days": 3}."#);
    let ping = "<tool_call>\n<function=ping>\n</function>\n</tool_call>";
    assert_eq!(xml(ping), "0 ping {}.");
    let around = format!("Let me see.\n\n{ping}\nAnd\n{}\n{ping}\n\nDone.", call_of(&[("city", "Bern")]));
    assert_eq!(xml(&around), "[Let me see.]0 ping {}.[\nAnd]1 weather {\"city\": \"Bern\"}.2 ping {}.[\n\nDone.]");
    let dense = "<tool_call><function=ping><parameter=city>Bern</parameter><parameter=days>3</parameter></function></tool_call>";
    assert_eq!(xml(dense), r#"0 ping {"city": "Bern", "days": 3}."#);
}

#[test]
fn an_xml_string_parameter_keeps_its_exact_text() {
    for text in [
        "",
        " ",
        "\n",
        "two\n\nlines\n",
        "\"quoted\" \\ \t \u{1} ö日",
        "3",
        "true",
        "{\"a\": 1}",
        "<b>bold</b> a < b",
        "</parameter>",
        "a</parameter>\nb",
        "\n</parameter>\n</parameter>\n",
        "<parameter=days>\n3\n</parameter> is how it is written",
        "</parameter>\n</func",
        "</function>\n<tool_call></tool_call>",
        "<tool_call>\n<function=ping>",
    ] {
        let expected = format!("0 weather {}.", json!({"city": text}).to_string().replacen(':', ": ", 1));
        assert_eq!(xml(&call_of(&[("city", text)])), expected, "{text:?}");
    }
}

#[test]
fn the_schema_decides_the_type_of_an_xml_value() {
    for (name, text, expected) in [
        ("days", "-3", "-3"),
        ("days", " 12345678901234567890123\n", "12345678901234567890123"),
        ("days", "three", "\"three\""),
        ("days", "null", "null"),
        ("share", "1e-3", "1e-3"),
        ("exact", "true", "true"),
        ("exact", "False", "false"),
        ("exact", "yes", "\"yes\""),
        ("list", "[1, \"</parameter>\"]", "[1, \"</parameter>\"]"),
        ("list", "[1, ", "\"[1, \""),
        ("more", "{\n  \"a\": null\n}", "{\n  \"a\": null\n}"),
        ("note", "null", "null"),
        ("note", "None", "null"),
        ("note", "nullify", "\"nullify\""),
        ("note", "nul", "\"nul\""),
        ("note", "3", "\"3\""),
        ("id", "3", "3"),
        ("id", "3a", "\"3a\""),
        ("id", "true", "\"true\""),
        ("zone", "0", "0"),
        ("zone", "utc", "\"utc\""),
        ("any", "3", "\"3\""),
        ("unknown", "3", "\"3\""),
    ] {
        let reply = call_of(&[(name, text)]);
        assert_eq!(xml(&reply), format!("0 weather {{\"{name}\": {expected}}}."), "{name} {text}");
    }
    let of_another_tool = call_of(&[("days", "3")]).replace("weather", "somebody");
    assert_eq!(xml(&of_another_tool), r#"0 somebody {"days": "3"}."#);
}

#[test]
fn malformed_xml_calls_are_text() {
    for reply in [
        "<tool_call>",
        "<tool_call>\nnot a function\n</tool_call>",
        "<tool_call>\n{\"name\": \"weather\", \"arguments\": {}}\n</tool_call>",
        "<tool_call><function=></function></tool_call>",
        "<tool_call>\n<function=wea\nther>\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather",
        "<function=weather>\n</function>",
        "</tool_call>\n</function> <parameter=city>",
    ] {
        assert_eq!(xml(reply), format!("[{reply}]"));
    }
    let twice = format!("<tool_call>\n{}", call_of(&[]));
    assert_eq!(xml(&twice), "[<tool_call>]0 weather {}.");
}

#[test]
fn a_truncated_xml_call_is_closed_despite_missing_tags() {
    let head = "<tool_call>\n<function=weather>\n";
    assert_eq!(xml(head), "0 weather !");
    assert_eq!(xml(&format!("{head}<parameter=ci")), "0 weather !");
    assert_eq!(xml(&format!("{head}<parameter=city>\nPar")), "0 weather {\"city\": \"Par!");
    assert_eq!(xml(&format!("{head}<parameter=days>\n1")), "0 weather {\"days\": !");
    assert_eq!(xml(&format!("{head}<parameter=days>\n1\n</parameter>\n")), "0 weather {\"days\": 1!");
    assert_eq!(xml(&format!("{head}Oh no.")), "0 weather ![Oh no.]");
    assert_eq!(xml(&format!("{head}<parameter=>\n1")), "0 weather ![<parameter=>\n1]");
    let city = "<parameter=city>\nParis\n</parameter>\n";
    assert_eq!(xml(&format!("{head}{city}</function>")), r#"0 weather {"city": "Paris"}."#);
    assert_eq!(xml(&format!("{head}{city}</tool_call> So")), r#"0 weather {"city": "Paris"}.[ So]"#);
    let unclosed = "<parameter=city>\nParis\n</function>\n</tool_call>\nSo";
    assert_eq!(xml(&format!("{head}{unclosed}")), "0 weather {\"city\": \"Paris\"}.[\nSo]");
}

#[test]
fn an_xml_call_inside_reasoning_is_reasoning() {
    let (inside, after) = (call_of(&[("city", "Bern")]), call_of(&[("days", "1")]));
    let reply = format!("Call {inside}?\n</think>\n\n{after}");
    assert_eq!(described(BEGUN, ToolFormat::QwenXml, &reply), format!("(Call {inside}?)0 weather {{\"days\": 1}}."));
}

#[test]
fn xml_strings_stream_and_other_values_arrive_whole() {
    assert_streams(
        ToolFormat::QwenXml,
        &[
            ("<tool_call>\n<function=weat", ""),
            ("her>", "weather"),
            ("\n<parameter=city", ""),
            (">\nNew ", "{\"city\": \"New "),
            ("York\n", "York"),
            ("</para", ""),
            ("graph", "\\n</paragraph"),
            ("\n</parameter>\n<", ""),
            ("parameter=", "\""),
            ("days>\n1", ", \"days\": "),
            ("2", ""),
            ("\n</parameter>\n</function>", "12}"),
        ],
    );
}

#[test]
fn calls_of_gemma_4_become_json() {
    let nested = "<|tool_call>call:weather{city:<|\"|>Saint-\"Denis\", {a:1}<|\"|>,days:-3,exact:true,\
                  list:[<|\"|>a<|\"|>,2.5e3,[],{<|\"|>q<|\"|>:null}],more:{deep:{er:[false]}}}<tool_call|>";
    let json = r#"{"city": "Saint-\"Denis\", {a:1}", "days": -3, "exact": true, "list": ["a", 2.5e3, [], {"q": null}], "more": {"deep": {"er": [false]}}}"#;
    assert_eq!(gemma(nested), format!("0 weather {json}."));
    serde_json::from_str::<Value>(json).expect("the arguments are JSON");
    let several = "Let me see.\n<|tool_call>call:ping{}<tool_call|><|tool_call>call:ping{ any : 1 }<tool_call|>\nDone.";
    assert_eq!(gemma(several), "[Let me see.]0 ping {}.1 ping {\"any\": 1}.[\nDone.]");
    // The quotes of a string may follow text that looks like their beginning.
    assert_eq!(
        gemma("<|tool_call>call:ping{any:<|\"|><<|<|\"<\n\\<|\"|>}<tool_call|>"),
        r#"0 ping {"any": "<<|<|\"<\n\\"}."#
    );
    // The value's type in the schema decides, as in the XML format.
    assert_eq!(
        gemma("<|tool_call>call:weather{city:12,days:12,note:None,any:<|\"|>12<|\"|>,id:7}<tool_call|>"),
        r#"0 weather {"city": "12", "days": 12, "note": null, "any": "12", "id": 7}."#
    );
}

#[test]
fn calls_of_gemma_4_with_small_mistakes_are_read() {
    for (arguments, json) in [
        ("{\"city\":\"A, }\\\"\",\"days\":2}", r#"{"city": "A, }\"", "days": 2}"#),
        ("{city:New York, days: 2,}", r#"{"city": "New York", "days": 2}"#),
        ("{<|\"|>city<|\"|>:<|\"|>Bern<|\"|>}", r#"{"city": "Bern"}"#),
        ("{list:[1,\n 2 , True]}", r#"{"list": [1, 2, true]}"#),
        ("{list:['a', 'b\"'],city:'Bern, CH'}", r#"{"list": ["a", "b\""], "city": "Bern, CH"}"#),
        ("{any:\"a\nb\",city:null}", r#"{"any": "a\nb", "city": null}"#),
    ] {
        assert_eq!(gemma(&format!("<|tool_call>call:weather{arguments}<tool_call|>")), format!("0 weather {json}."));
        assert_eq!(gemma(&format!("<|tool_call>call:weather{arguments}")), format!("0 weather {json}."), "no end tag");
    }
    let unclosed = ["{days:1", "{days:1,", "{any:[{city:<|\"|>a<|\"|>"]
        .map(|text| format!("<|tool_call>call:ping{text}<tool_call|>"));
    assert_eq!(
        gemma(&unclosed.concat()),
        r#"0 ping {"days": 1}.1 ping {"days": 1}.2 ping {"any": [{"city": "a"}]}."#,
        "the brackets at the end are missing"
    );
    // The next call is read, even if a string before it is not closed.
    for open in ["<|\"|>x", "\"x"] {
        let reply = format!("<|tool_call>call:ping{{any:{open}}}<tool_call|>\n<|tool_call>call:ping{{}}<tool_call|>");
        assert!(gemma(&reply).ends_with("!1 ping {}."), "{open}");
    }
    let deep = format!("<|tool_call>call:ping{{any:{}", "[".repeat(200));
    assert!(gemma(&deep).contains('!'), "a value has at most 100 levels");
    for cut in ["{city:<|\"|>Be", "{city", "{days:1", "{list:[1", "{city:<|\"|>Bern<|\"|>,", "{<|\"|>ci"] {
        assert!(gemma(&format!("<|tool_call>call:weather{cut}")).ends_with('!'), "{cut}");
    }
    for broken in ["{city:}", "{city::1}", "{list:[1}", "{{city:1}}", "{days:1<b", "{<b"] {
        assert!(gemma(&format!("<|tool_call>call:weather{broken}")).contains('!'), "{broken}");
    }
    for reply in ["<|tool_call>", "<|tool_call>weather{}", "<|tool_call>call:{}", "<|tool_call>call:a\n{}"] {
        assert_eq!(gemma(reply), format!("[{reply}]"));
    }
}

#[test]
fn strings_of_gemma_4_stream_and_other_values_arrive_whole() {
    assert_streams(
        ToolFormat::Gemma4,
        &[
            ("<|tool_call>", ""),
            ("call:weat", ""),
            ("her{", "weather"),
            ("ci", "{"),
            ("ty:", "\"city\": "),
            ("<|\"|>", "\""),
            ("New ", "New "),
            ("York", "York"),
            ("<|\"|>", "\""),
            (",days:1", ", \"days\": "),
            ("2", ""),
            ("}", "12}"),
        ],
    );
}

#[test]
fn gemma_4_reasons_in_a_channel() {
    let [possible, begun] = CHANNEL;
    let think = |thinking, reply: &str| described(thinking, ToolFormat::Gemma4, reply);
    let call = "<|tool_call>call:ping{}<tool_call|>";
    let reply = format!("<|channel>thought\nHm <b>\n<channel|>So:{call}");
    assert_eq!(think(possible, &reply), "(Hm <b>)[So:]0 ping {}.");
    assert_eq!(think(begun, &reply), think(possible, &reply), "the repeated opening tag is dropped");
    assert_eq!(think(begun, "Hm.\n<channel|>So"), "(Hm.)[So]");
    assert_eq!(think(possible, "<|channel>thought\n<channel|>So"), "[So]");
    // The tags are control tokens, so they have their meaning anywhere.
    assert_eq!(think(begun, &format!("Hm.\n{call}<channel|>")), "(Hm.)0 ping {}.");
    assert_eq!(think(possible, "So.<|channel>thought\nHm.<channel|>Yes<channel|>."), "[So.](Hm.)[Yes][.]");
    assert_eq!(think(possible, "<|tool_call>call:ping{any:}<tool_call|>So"), "0 ping {\"any\": ![}][So]");
    let plain = |thinking, reply: &str| described(thinking, ToolFormat::None, reply);
    assert_eq!(plain(possible, &format!("So.<|channel>thought\nHm.<channel|>{call}")), format!("[So.](Hm.)[{call}]"));
    assert_eq!(plain(Thinking::Off, "<|channel>thought"), "[<|channel>thought]");
}

#[test]
fn reasoning_ends_at_its_closing_tag() {
    let think = |thinking, reply: &str| described(thinking, ToolFormat::Hermes, reply);
    let reply = "<think>\nHm <b>.\n\nYes.\n</think>\n\nHello <think>\n";
    assert_eq!(think(POSSIBLE, reply), "(Hm <b>.\n\nYes.)[Hello <think>\n]");
    assert_eq!(think(BEGUN, reply), "(Hm <b>.\n\nYes.)[Hello <think>\n]", "the repeated opening tag is dropped");
    assert_eq!(think(BEGUN, "\nHm.</think>Hello"), "(Hm.)[Hello]");
    assert_eq!(think(BEGUN, "</think>\nHello"), "[Hello]");
    assert_eq!(think(BEGUN, "Cut o\n</thi"), "(Cut o\n</thi)");
    assert_eq!(think(POSSIBLE, " <thin"), "[ <thin]");
    assert_eq!(think(POSSIBLE, "\nNo <think>x</think>"), "[\nNo <think>x</think>]");
    assert_eq!(think(Thinking::Off, reply), format!("[{reply}]"));
    let inside = "Call <tool_call>\n{\"name\": \"a\", \"arguments\": {}}\n</tool_call>?";
    let after = "<tool_call>\n{\"name\": \"b\", \"arguments\": {}}\n</tool_call>";
    assert_eq!(think(BEGUN, &format!("{inside}\n</think>\n\n{after}")), format!("({inside})0 b {{}}."));
    let call = r#"{"name": "weather", "parameters": {}}"#;
    assert_eq!(described(BEGUN, ToolFormat::Llama3Json, &format!("Hm.</think>\n{call}")), "(Hm.)0 weather {}.");
}

#[test]
fn without_reply_formats_the_text_is_unchanged() {
    let mut plain = parser(Thinking::Off, ToolFormat::None);
    for piece in ["<think>", "\n", "<tool_call>", ""] {
        let expected: Vec<_> = (!piece.is_empty()).then(|| ReplyPart::Text(piece.to_owned())).into_iter().collect();
        assert_eq!(plain.feed(piece), expected);
    }
    assert!(plain.finish().is_empty());
}

#[test]
fn only_a_possible_tag_is_held_back() {
    let mut hermes = parser(Thinking::Off, ToolFormat::Hermes);
    let mut shown = |piece: &str| hermes.feed(piece).iter().map(ReplyPart::text).collect::<String>();
    assert_eq!(shown("a <"), "a ");
    assert_eq!(shown("b"), "<b");
    assert_eq!(shown("\n"), "");
    assert_eq!(shown(" <tool"), "\n ");
    assert_eq!(shown("_call>{\"name\": \"ping\", \"argu"), "");
    // After the name, the arguments arrive as they are written.
    assert_eq!(shown("ments\": {"), "<tool_call>{\"name\": \"ping\", \"arguments\": {");
    assert_eq!(shown("\"x\""), "\"x\"");
    assert_eq!(shown(": \"<"), ": \"<");
}

/// Fragments that replies are made of, whole and broken.
const FRAGMENTS: [&str; 42] = [
    "<tool_call>",
    "\n",
    "</tool_call>",
    "{\"name\": \"weather\"",
    ", \"arguments\": ",
    "{\"x\": ",
    "}",
    "}}",
    "\"}",
    "<think>",
    "</think>",
    "<|python_tag|>",
    "; ",
    " ",
    "text",
    "<",
    "<tool_",
    "{",
    "[",
    "\\\"",
    "ö日",
    "{\"name\": \"ping\", \"parameters\": {}}",
    "<tool_call>\n{\"name\": \"a\", \"arguments\": {\"b\": \"c\"}}\n</tool_call>",
    "null,",
    "<tool_call>\n<function=weather>\n",
    "<parameter=city>\n",
    "<parameter=days>",
    "</parameter>",
    "</function>",
    "</function>\n</tool_call>",
    "<tool_call>\n<function=ping>\n<parameter=note>\nnull\n</parameter>\n</function>\n</tool_call>",
    "3\n</parameter>\n",
    "<|channel>thought\n",
    "<channel|>",
    "<|tool_call>call:weather{",
    "city:<|\"|>",
    "<|\"|>",
    "list:[1,{",
    "days:2,",
    "}]",
    "}<tool_call|>",
    "<|tool_call>call:ping{any:[<|\"|>b<|\"|>,0]}<tool_call|>",
];

prop_compose! {
    /// A reply, and the pieces of the same reply cut at random positions.
    fn reply_in_pieces()(
        fragments in prop::collection::vec(prop::sample::select(FRAGMENTS.as_slice()), 0..24),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) -> (String, Vec<String>) {
        let reply = fragments.concat();
        let characters: Vec<char> = reply.chars().collect();
        let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(characters.len() + 1)).collect();
        cuts.extend([0, characters.len()]);
        cuts.sort_unstable();
        let pieces = cuts.windows(2).map(|cut| characters[cut[0]..cut[1]].iter().collect()).collect();
        (reply, pieces)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_text_is_lost_and_pieces_do_not_change_parts(
        (reply, pieces) in reply_in_pieces(),
        thinking in prop::sample::select(vec![Thinking::Off, POSSIBLE, BEGUN, CHANNEL[0], CHANNEL[1]]),
        tools in prop::sample::select(vec![
            ToolFormat::None, ToolFormat::Hermes, ToolFormat::Llama3Json, ToolFormat::QwenXml, ToolFormat::Gemma4,
        ]),
    ) {
        let parts = read(parser(thinking, tools), pieces.iter().map(String::as_str));
        prop_assert_eq!(parts.iter().map(ReplyPart::text).collect::<String>(), &*reply);
        prop_assert_eq!(&parts, &read(parser(thinking, tools), [&*reply]));
        let (mut open, mut arguments) = (None, "");
        for part in &parts {
            match part {
                ReplyPart::CallEnd { is_closed: true } if matches!(tools, ToolFormat::QwenXml | ToolFormat::Gemma4) => {
                    prop_assert!(open.take().is_some() && serde_json::from_str::<Value>(arguments).is_ok(), "{}", arguments);
                }
                ReplyPart::CallBegin { index, .. } => prop_assert!(open.replace(*index).is_none(), "calls do not nest"),
                ReplyPart::CallEnd { .. } => prop_assert!(open.take().is_some(), "only an open call ends"),
                ReplyPart::Arguments { json, .. } => {
                    prop_assert!(open.is_some(), "arguments belong to a call");
                    arguments = json;
                }
                ReplyPart::Text(_) | ReplyPart::Reasoning(_) => prop_assert!(open.is_none(), "a call holds no text"),
                ReplyPart::Markup(_) => {}
            }
        }
        prop_assert!(open.is_none(), "every call ends");
    }
}

#[test]
fn parsing_a_long_reply_takes_linear_time() {
    // Quadratic time would take minutes for each unit.
    let (name, value) = ("<tool_call><function=f><parameter=", "<tool_call><function=f><parameter=city>");
    let common = ["\n", "<", " ", "{", "; "];
    let units = ["<tool_call>", "<tool_call>{\"name\": \"", "</think>", name, "</parameter>\n"];
    let mut rows = Vec::new();
    for begin in ["", "<tool_call>", name, value] {
        for unit in common.into_iter().chain(units) {
            let formats = [ToolFormat::Hermes, ToolFormat::Llama3Json, ToolFormat::QwenXml];
            rows.extend(formats.map(|format| (begin, unit, format, [Thinking::Off, POSSIBLE, BEGUN])));
        }
    }
    let [possible, begun] = CHANNEL;
    for begin in ["", "<|tool_call>call:f{a:", "<|tool_call>call:f{a:[", "<|tool_call>call:f{a:<|\"|>"] {
        for unit in common.into_iter().chain(["<|tool_call>call:f{", "<|\"|>", "<channel|>", "[", "a,", "<|", "\""]) {
            rows.push((begin, unit, ToolFormat::Gemma4, [Thinking::Off, possible, begun]));
        }
    }
    for (begin, unit, format, thinking) in rows {
        let reply = begin.to_owned() + &unit.repeat(200_000 / unit.len());
        for thinking in thinking {
            let mut parser = parser(thinking, format);
            let bytes = |parts: Vec<ReplyPart>| parts.iter().map(|part| part.text().len()).sum::<usize>();
            let mut received = 0;
            for piece in reply.as_bytes().chunks(3) {
                received += bytes(parser.feed(std::str::from_utf8(piece).expect("ASCII")));
            }
            assert_eq!(received + bytes(parser.finish()), reply.len(), "{unit:?}");
        }
    }
}
