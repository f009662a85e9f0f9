//! Chat templates of public models, held to Jinja2. `tools/cpu/chat_templates.py` collects the templates and writes the
//! cases, with what transformers' environment renders; they are not part of this repository.
//!
//! ```text
//! BURSAR_TEMPLATE_CASES=cases.json cargo test -p bursar-model --test public_templates -- --nocapture
//! ```

use std::collections::BTreeMap;

use bursar_model::text::{ChatTemplate, TemplateInputs, TemplateLimits, TemplateSources};
use serde_json::Value;

/// How much of two texts to show where they differ.
const SHOWN_CHARS: usize = 90;

fn inputs(case: &Value) -> TemplateInputs {
    TemplateInputs {
        add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap_or(true),
        continue_final_message: case["continue_final_message"].as_bool().unwrap_or(false),
        tools: case["tools"].as_array().cloned(),
        variables: case["variables"].as_object().cloned().unwrap_or_default(),
        now_unix_seconds: case["now_unix_seconds"].as_i64().unwrap_or(0),
        template: None,
    }
}

/// What we render, or the error.
fn rendered(source: &str, case: &Value) -> Result<String, String> {
    let special = case["special_tokens"].as_object().into_iter().flatten();
    let sources = TemplateSources {
        templates: [("default".to_owned(), source.to_owned())].into(),
        special_tokens: special.map(|(name, token)| (name.clone(), token.as_str().unwrap_or("").to_owned())).collect(),
    };
    let shown = |error: bursar_model::error::TextError| format!("{error} {:?}", reason(&error));
    let template = ChatTemplate::new(sources, TemplateLimits::default()).map_err(shown)?;
    template.render_json(&case["messages"], &inputs(case)).map_err(shown)
}

fn reason(error: &bursar_model::error::TextError) -> Option<&str> {
    match error {
        bursar_model::error::TextError::Template { reason, .. }
        | bursar_model::error::TextError::TemplateRefused { reason, .. } => Some(&reason.0),
        _ => None,
    }
}

/// The texts from shortly before their first difference.
fn difference(expected: &str, ours: &str) -> String {
    let equal = expected.chars().zip(ours.chars()).take_while(|(left, right)| left == right).count();
    let from = |text: &str| text.chars().skip(equal.saturating_sub(20)).take(SHOWN_CHARS).collect::<String>();
    format!("Jinja2 {:?}, here {:?}", from(expected), from(ours))
}

#[test]
fn public_templates_render_as_jinja2_does() {
    let Some(path) = std::env::var_os("BURSAR_TEMPLATE_CASES") else {
        println!("skipped: BURSAR_TEMPLATE_CASES names no file; tools/cpu/chat_templates.py writes one");
        return;
    };
    let text = std::fs::read_to_string(path).expect("the file is readable");
    let recorded: Value = serde_json::from_str(&text).expect("the file is JSON");
    let (mut equal, mut different) = (BTreeMap::<&str, usize>::new(), BTreeMap::<&str, Vec<String>>::new());
    for case in recorded["cases"].as_array().expect("cases") {
        let name = case["template"].as_str().expect("a template's name");
        let source = recorded["templates"][name].as_str().expect("a template");
        let chat = case["chat"].as_str().unwrap_or("");
        let told = match (case["text"].as_str(), rendered(source, case)) {
            (Some(expected), Ok(ours)) if expected == ours => None,
            (Some(expected), Ok(ours)) => Some(difference(expected, &ours)),
            (Some(_), Err(error)) => Some(format!("refused here: {error}")),
            (None, Ok(ours)) => Some(format!("refused by Jinja2 ({}), here {:.90?}", case["error"], ours)),
            (None, Err(_)) => None,
        };
        match told {
            None => *equal.entry(name).or_default() += 1,
            Some(told) => different.entry(name).or_default().push(format!("{chat}: {told}")),
        }
    }
    different.iter().for_each(|(name, cases)| println!("{name}\n    {}", cases.join("\n    ")));
    let (same, others): (usize, usize) = (equal.values().sum(), different.values().map(Vec::len).sum());
    println!("{same} cases equal, {others} different, {} of them in {} templates", others, different.len());
    assert!(same > 0 && others == 0, "{others} of {} cases differ from Jinja2", same + others);
}
