//! Parts of a reply (reasoning, text and calls), however the text arrives.

use bursar_model::text::{ReplyParser, ReplyPart, Thinking, ToolFormat};
use proptest::prelude::*;

fn parser(thinking: Thinking, tools: ToolFormat) -> ReplyParser {
    let names: Vec<String> = ["weather", "ping", "a\"b"].map(str::to_owned).into();
    ReplyParser::new(thinking, tools, names)
}

/// Joins adjacent parts of one kind, as a reader of the stream does.
fn joined(parts: impl IntoIterator<Item = ReplyPart>) -> Vec<ReplyPart> {
    let mut whole: Vec<ReplyPart> = Vec::new();
    for part in parts {
        match (whole.last_mut(), part) {
            (Some(ReplyPart::Text(last)), ReplyPart::Text(more))
            | (Some(ReplyPart::Reasoning(last)), ReplyPart::Reasoning(more))
            | (Some(ReplyPart::Arguments(last)), ReplyPart::Arguments(more))
            | (Some(ReplyPart::Markup(last)), ReplyPart::Markup(more)) => last.push_str(&more),
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
fn told(thinking: Thinking, tools: ToolFormat, reply: &str) -> String {
    let parts = read(parser(thinking, tools), [reply]);
    assert_eq!(parts.iter().map(ReplyPart::text).collect::<String>(), reply, "no text of the reply is lost");
    let mut told = String::new();
    for part in parts {
        told += &match part {
            ReplyPart::Text(text) => format!("[{text}]"),
            ReplyPart::Reasoning(text) => format!("({text})"),
            ReplyPart::CallBegin { index, name } => format!("{index} {name} "),
            ReplyPart::Arguments(text) => text,
            ReplyPart::CallEnd { is_closed } => if is_closed { "." } else { "!" }.to_owned(),
            ReplyPart::Markup(_) => continue,
        };
    }
    told
}

fn hermes(reply: &str) -> String {
    told(Thinking::Off, ToolFormat::Hermes, reply)
}

fn llama(reply: &str) -> String {
    told(Thinking::Off, ToolFormat::Llama3Json, reply)
}

#[test]
fn calls_stand_before_between_and_after_text() {
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
fn a_call_may_say_its_parts_in_any_order() {
    let reply =
        r#"<tool_call> {"id": [1, {"name": 2}], "arguments": {"x": "y"}, "name": "a\"b", "more": null} </tool_call>"#;
    assert_eq!(hermes(reply), r#"0 a"b {"x": "y"}."#);
    assert_eq!(hermes("<tool_call>{\"name\": \"ping\"}</tool_call>"), "0 ping .");
}

#[test]
fn what_is_no_call_is_text() {
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
fn a_call_that_breaks_off_is_ended_and_what_follows_is_kept() {
    let head = "<tool_call>\n{\"name\": \"weather\", \"arguments\": ";
    assert_eq!(hermes(&format!("{head}{{\"x\": [1")), "0 weather {\"x\": [1!");
    assert_eq!(hermes(&format!("{head}{{\"x\": 1\n</tool_call>\nOh.")), "0 weather {\"x\": 1\n![\nOh.]");
    // A forgotten closing brace or tag does not break the call.
    assert_eq!(hermes(&format!("{head}{{\"x\": 1}}\n</tool_call>")), "0 weather {\"x\": 1}.");
    assert_eq!(hermes(&format!("{head}{{}}}}\n{head}{{}}}}")), "0 weather {}.1 weather {}.");
    assert_eq!(hermes(&format!("{head}{{}}}} so")), "0 weather {}.[ so]");
}

#[test]
fn json_without_a_tag_is_a_call_only_at_the_beginning_and_of_a_known_tool() {
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
fn reasoning_ends_at_its_tag_wherever_it_began() {
    let think = |thinking, reply: &str| told(thinking, ToolFormat::Hermes, reply);
    let reply = "<think>\nHm <b>.\n\nYes.\n</think>\n\nHello <think>\n";
    assert_eq!(think(Thinking::Possible, reply), "(Hm <b>.\n\nYes.)[Hello <think>\n]");
    assert_eq!(
        think(Thinking::Begun, reply),
        "(Hm <b>.\n\nYes.)[Hello <think>\n]",
        "the repeated opening tag is dropped"
    );
    assert_eq!(think(Thinking::Begun, "\nHm.</think>Hello"), "(Hm.)[Hello]");
    assert_eq!(think(Thinking::Begun, "</think>\nHello"), "[Hello]");
    assert_eq!(think(Thinking::Begun, "Cut o\n</thi"), "(Cut o\n</thi)");
    assert_eq!(think(Thinking::Possible, " <thin"), "[ <thin]");
    assert_eq!(think(Thinking::Possible, "\nNo <think>x</think>"), "[\nNo <think>x</think>]");
    assert_eq!(think(Thinking::Off, reply), format!("[{reply}]"));
    let inside = "Call <tool_call>\n{\"name\": \"a\", \"arguments\": {}}\n</tool_call>?";
    let after = "<tool_call>\n{\"name\": \"b\", \"arguments\": {}}\n</tool_call>";
    assert_eq!(think(Thinking::Begun, &format!("{inside}\n</think>\n\n{after}")), format!("({inside})0 b {{}}."));
    let call = r#"{"name": "weather", "parameters": {}}"#;
    assert_eq!(told(Thinking::Begun, ToolFormat::Llama3Json, &format!("Hm.</think>\n{call}")), "(Hm.)0 weather {}.");
}

#[test]
fn without_formats_the_text_passes_as_it_is() {
    let mut plain = parser(Thinking::Off, ToolFormat::None);
    for piece in ["<think>", "\n", "<tool_call>", ""] {
        let expected: Vec<_> = (!piece.is_empty()).then(|| ReplyPart::Text(piece.to_owned())).into_iter().collect();
        assert_eq!(plain.feed(piece), expected);
    }
    assert!(plain.finish().is_empty());
}

#[test]
fn only_what_may_be_a_tag_waits() {
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
const FRAGMENTS: [&str; 24] = [
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
    fn no_character_is_lost_and_no_cut_changes_a_part(
        (reply, pieces) in reply_in_pieces(),
        thinking in prop::sample::select(vec![Thinking::Off, Thinking::Possible, Thinking::Begun]),
        tools in prop::sample::select(vec![ToolFormat::None, ToolFormat::Hermes, ToolFormat::Llama3Json]),
    ) {
        let parts = read(parser(thinking, tools), pieces.iter().map(String::as_str));
        prop_assert_eq!(parts.iter().map(ReplyPart::text).collect::<String>(), &*reply);
        prop_assert_eq!(&parts, &read(parser(thinking, tools), [&*reply]));
        let mut open = None;
        for part in &parts {
            match part {
                ReplyPart::CallBegin { index, .. } => prop_assert!(open.replace(*index).is_none(), "calls do not nest"),
                ReplyPart::CallEnd { .. } => prop_assert!(open.take().is_some(), "a call ends only after it began"),
                ReplyPart::Arguments(_) => prop_assert!(open.is_some(), "arguments are within a call"),
                ReplyPart::Text(_) | ReplyPart::Reasoning(_) => prop_assert!(open.is_none(), "a call holds no text"),
                ReplyPart::Markup(_) => {}
            }
        }
        prop_assert!(open.is_none(), "every call ends");
    }
}

#[test]
fn a_long_reply_costs_as_much_a_character_as_a_short_one() {
    // Quadratic time would take minutes for each unit.
    for unit in ["\n", "<", "<tool_call>", "<tool_call>{\"name\": \"", " ", "{", "; ", "</think>"] {
        let reply = unit.repeat(200_000 / unit.len());
        for tools in [ToolFormat::Hermes, ToolFormat::Llama3Json] {
            for thinking in [Thinking::Off, Thinking::Possible, Thinking::Begun] {
                let mut parser = parser(thinking, tools);
                let bytes = |parts: Vec<ReplyPart>| parts.iter().map(|part| part.text().len()).sum::<usize>();
                let mut heard = 0;
                for piece in reply.as_bytes().chunks(3) {
                    heard += bytes(parser.feed(std::str::from_utf8(piece).expect("ASCII")));
                }
                assert_eq!(heard + bytes(parser.finish()), reply.len(), "{unit:?}");
            }
        }
    }
}
