//! Chat templates of public models, and expressions, compared with Jinja2.
//! `tools/cpu/chat_templates.py` renders them as transformers does. Some of these templates are
//! recorded in `tests/golden/jinja.tar.xz`. The command for all other templates is:
//!
//! ```text
//! BURSAR_TEMPLATE_CASES=cases.json cargo test -p bursar-model --test public_templates -- --nocapture
//! ```

use std::collections::BTreeMap;

use bursar_model::text::{ChatTemplate, TemplateInputs, TemplateLimits, TemplateSources};
use serde_json::Value;

/// Number of characters of each text that are printed around the first difference.
const SHOWN_CHARS: usize = 90;

/// Errors of Jinja2 in cases that this implementation renders: its `map` returns lists, so
/// `tojson` accepts the result.
const LENIENT: [&str; 1] = ["Object of type generator is not JSON serializable"];

fn inputs(recorded: &Value, chat: &Value) -> TemplateInputs {
    TemplateInputs {
        add_generation_prompt: chat["add_generation_prompt"].as_bool().unwrap_or(true),
        continue_final_message: chat["continue_final_message"].as_bool().unwrap_or(false),
        tools: chat["tools"].as_array().cloned(),
        variables: chat["variables"].as_object().cloned().unwrap_or_default(),
        now_unix_seconds: recorded["now_unix_seconds"].as_i64().unwrap_or(0),
        template: None,
    }
}

/// The text rendered by this implementation, or its error.
fn rendered(recorded: &Value, source: &str, chat: &Value) -> Result<String, String> {
    let special = recorded["special_tokens"].as_object().into_iter().flatten();
    let sources = TemplateSources {
        templates: [("default".to_owned(), source.to_owned())].into(),
        special_tokens: special.map(|(name, token)| (name.clone(), token.as_str().unwrap_or("").to_owned())).collect(),
    };
    let template = ChatTemplate::new(sources, TemplateLimits::default());
    let text = template.and_then(|template| template.render_json(&chat["messages"], &inputs(recorded, chat)));
    text.map_err(|error| error.to_string())
}

/// The two texts from shortly before their first difference.
fn difference(expected: &str, ours: &str) -> String {
    let equal = expected.chars().zip(ours.chars()).take_while(|(left, right)| left == right).count();
    let from = |text: &str| text.chars().skip(equal.saturating_sub(20)).take(SHOWN_CHARS).collect::<String>();
    format!("Jinja2 {:?}, here {:?}", from(expected), from(ours))
}

/// Compares all cases of a file. Returns the number of equal cases and of different cases.
fn compared(path: &std::path::Path) -> (usize, usize) {
    let text = std::fs::read_to_string(path).expect("the file is readable");
    let recorded: Value = serde_json::from_str(&text).expect("the file is JSON");
    let (mut equal, mut different) = (0, BTreeMap::<&str, Vec<String>>::new());
    for case in recorded["cases"].as_array().expect("cases") {
        let (name, chat) = (case["template"].as_str().expect("a name"), case["chat"].as_str().expect("a chat"));
        let source = recorded["templates"][name].as_str().expect("a template");
        let error = case["error"].as_str().unwrap_or_default();
        let difference = match (case["text"].as_str(), rendered(&recorded, source, &recorded["chats"][chat])) {
            (Some(expected), Ok(ours)) => (expected != ours).then(|| difference(expected, &ours)),
            (Some(_), Err(error)) => Some(format!("refused here: {error}")),
            (None, Ok(_)) if LENIENT.iter().any(|lenient| error.contains(lenient)) => None,
            (None, Ok(ours)) => Some(format!("refused by Jinja2 ({error}), here {:?}", difference("", &ours))),
            (None, Err(_)) => None,
        };
        match difference {
            None => equal += 1,
            Some(difference) => different.entry(name).or_default().push(format!("{chat}: {difference}")),
        }
    }
    for (source, expected) in recorded["expressions"].as_object().into_iter().flatten() {
        let ours = rendered(&recorded, source, &recorded["chats"]["plain"]);
        if ours.as_ref().ok().map(String::as_str) == expected.as_str() {
            equal += 1;
        } else {
            different.entry(source).or_default().push(format!("Jinja2 {expected}, here {ours:?}"));
        }
    }
    different.iter().for_each(|(name, cases)| println!("{name}\n    {}", cases.join("\n    ")));
    let others = different.values().map(Vec::len).sum();
    println!("{equal} cases equal, {others} different, in {} templates", different.len());
    (equal, others)
}

#[test]
fn stored_templates_and_expressions_render_as_in_jinja2() {
    let (equal, different) = compared(&bursar_golden::path("jinja/cases.json"));
    assert!(equal > 550 && different == 0, "{different} cases differ from Jinja2");
}

#[test]
fn public_templates_render_as_in_jinja2() {
    let Some(path) = std::env::var_os("BURSAR_TEMPLATE_CASES") else {
        println!("skipped: BURSAR_TEMPLATE_CASES names no file; tools/cpu/chat_templates.py writes one");
        return;
    };
    let (equal, different) = compared(path.as_ref());
    assert!(equal > 0 && different == 0, "{different} cases differ from Jinja2");
}
