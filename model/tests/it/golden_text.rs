//! Tokenizer and chat templates compared with recorded results of transformers.

use bursar_model::error::TextError;
use bursar_model::text::{
    ChatTemplate, ContentPart, ContinueError, Detokenizer, Message, PromptEncoder, ReasoningFormat, ReasoningTags,
    ReplyFormat, Role, TemplateInputs, TemplateLimits, TemplateSources, Thinking, ToolFormat,
};
use serde_json::Value;

use crate::common::{self, golden_json, qwen_tokenizer, small_tokenizer};

fn template(source: &str) -> ChatTemplate {
    let templates = [("default".to_owned(), source.to_owned())].into();
    let sources = TemplateSources { templates, special_tokens: Default::default() };
    ChatTemplate::new(sources, TemplateLimits::default()).expect("the template compiles")
}

fn inputs(options: &Value) -> TemplateInputs {
    let mut variables = options.as_object().cloned().unwrap_or_default();
    let add_generation_prompt = variables.remove("add_generation_prompt").is_some_and(|value| value == true);
    let tools = variables.remove("tools").and_then(|tools| tools.as_array().cloned());
    let continue_final_message = variables.remove("continue_final_message").is_some();
    TemplateInputs { add_generation_prompt, continue_final_message, tools, variables, ..TemplateInputs::default() }
}

/// The recorded messages in this crate's types. `None` if these types cannot express them.
fn messages(recorded: &Value) -> Option<Vec<Message>> {
    let part = |part: &Value| match part["type"].as_str() {
        Some("text") => Some(ContentPart::Text(part["text"].as_str()?.to_owned())),
        Some("image") => Some(ContentPart::Image),
        Some("video") => Some(ContentPart::Video),
        _ => None,
    };
    let message = |message: &Value| {
        let role = match message["role"].as_str()? {
            "system" => Role::System,
            "user" => Role::User,
            "assistant" => Role::Assistant,
            "tool" => Role::Tool,
            _ => return None,
        };
        let known = ["role", "content", "reasoning_content", "tool_calls"];
        let only_known_fields = message.as_object()?.keys().all(|key| known.contains(&key.as_str()));
        let calls = message["tool_calls"].as_array().into_iter().flatten().cloned().map(ContentPart::ToolCall);
        let mut content: Vec<_> = match &message["content"] {
            Value::String(text) => vec![ContentPart::Text(text.clone())],
            Value::Array(parts) => parts.iter().map(part).collect::<Option<_>>()?,
            _ => return None,
        };
        content.extend(message["reasoning_content"].as_str().map(|text| ContentPart::Reasoning(text.to_owned())));
        content.extend(calls);
        only_known_fields.then_some(Message { role, content })
    };
    recorded.as_array()?.iter().map(message).collect()
}

#[test]
fn released_templates_render_as_in_transformers() {
    let (mut in_our_words, mut refused) = (0, 0);
    for file in ["qwen2_5", "qwen2_5_vl", "qwen3_vl", "qwq", "qwen3", "llama_3_1"] {
        let golden = golden_json(&format!("chat_templates/{file}.json"));
        let template = template(golden["template"].as_str().expect("a template"));
        let cases = golden["cases"].as_array().expect("cases");
        assert!(cases.len() > 10);
        for case in cases {
            let inputs = inputs(&case["options"]);
            let Some(expected) = case["rendered"].as_str() else {
                let error = template
                    .render_json(&case["messages"], &inputs)
                    .expect_err("the template does not show the last turn");
                assert!(matches!(error, TextError::Continue(ContinueError::NotShown)), "{file} {}", case["name"]);
                refused += 1;
                continue;
            };
            let rendered = template.render_json(&case["messages"], &inputs).expect("the template renders");
            assert_eq!(expected, rendered, "{file} {}", case["name"]);
            if let Some(messages) = messages(&case["messages"]) {
                assert_eq!(
                    expected,
                    template.render(&messages, &inputs).expect("the template renders"),
                    "{file} {}",
                    case["name"]
                );
                in_our_words += 1;
            }
        }
    }
    assert!(in_our_words > 20 && refused > 2, "{in_our_words} {refused}");
}

#[test]
fn reply_formats_of_released_templates_are_detected() {
    use ReasoningFormat::ThinkTags;
    let qwen3 = [Thinking::Possible(ReasoningTags::THINK), Thinking::Off];
    let formats = [
        ("qwen2_5", ToolFormat::Hermes, ReasoningFormat::None, [Thinking::Off; 2]),
        ("qwq", ToolFormat::Hermes, ThinkTags, [Thinking::Begun(ReasoningTags::THINK); 2]),
        ("qwen3", ToolFormat::Hermes, ThinkTags, qwen3),
        ("llama_3_1", ToolFormat::Llama3Json, ReasoningFormat::None, [Thinking::Off; 2]),
        ("qwen2_5_vl", ToolFormat::None, ReasoningFormat::None, [Thinking::Off; 2]),
    ];
    for (file, tools, reasoning, thinking) in formats {
        let golden = golden_json(&format!("chat_templates/{file}.json"));
        let template = template(golden["template"].as_str().expect("a template"));
        let shows_tools = template.shows_tools(&TemplateInputs::default()).expect("the default is known");
        assert_eq!(shows_tools, tools != ToolFormat::None, "{file}");
        for (is_on, expected) in [true, false].into_iter().zip(thinking) {
            let variables = [("enable_thinking".to_owned(), is_on.into())].into_iter().collect();
            let inputs = TemplateInputs { variables, ..TemplateInputs::default() };
            let format = template.reply_format(&inputs).expect("the default is known");
            assert_eq!(format, ReplyFormat { tools, reasoning }, "{file}");
            // The user's text does not matter, because the prompt continues after it.
            let asked = [Message::text(Role::User, "<think>")];
            let prompt = template.render(&asked, &inputs).expect("the template renders");
            assert_eq!(format.reasoning.after(&prompt), expected, "{file}, thinking {is_on}");
        }
    }
}

#[test]
fn the_real_tokenizer_gives_the_recorded_ids_and_texts() {
    let tokenizer = qwen_tokenizer();
    let golden = golden_json("qwen2_5_tokenizer/strings.json");
    assert_eq!(golden["vocabulary"].as_u64(), Some(tokenizer.vocabulary_size() as u64));
    for case in golden["cases"].as_array().expect("cases") {
        let text = case["text"].as_str().expect("a text");
        let ids: Vec<u32> =
            case["ids"].as_array().into_iter().flatten().filter_map(|id| Some(id.as_u64()? as u32)).collect();
        assert_eq!(ids, tokenizer.encode(text, false).expect("the text encodes"), "{text:?}");
        for (skip, field) in [(false, "decoded"), (true, "decoded_without_special")] {
            assert_eq!(case[field].as_str(), tokenizer.decode(&ids, skip).ok().as_deref(), "{text:?}");
            let mut detokenizer = Detokenizer::new(tokenizer.clone(), skip);
            let mut pieces: String = ids.iter().map(|&id| detokenizer.feed(id).expect("the tokens decode")).collect();
            pieces += &detokenizer.flush().expect("the tokens decode");
            assert_eq!(case[field].as_str(), Some(pieces.as_str()), "{text:?} decoded in pieces");
        }
    }
}

#[test]
fn prompts_of_the_recorded_chats_have_the_recorded_ids() {
    let golden = golden_json("qwen2_5_vl/chat_template.json");
    let prompts =
        PromptEncoder::new(small_tokenizer(), template(golden["chat_template"].as_str().expect("a template")));
    let placeholder = prompts.tokenizer().id_of("<|image_pad|>").expect("the placeholder is a token");
    for name in ["single_image", "several_images", "two_turns", "same_image_twice", "text_only", "long_text"] {
        let case = golden_json(&format!("qwen2_5_vl/cases/{name}.json"));
        let recorded = std::fs::read(common::golden(&format!("qwen2_5_vl/cases/{name}.safetensors"))).expect("tensors");
        let tensors = safetensors::SafeTensors::deserialize(&recorded).expect("safetensors");
        let read = |tensor: &str| -> Vec<i64> {
            let data = tensors.tensor(tensor).expect("a tensor").data().to_vec();
            data.chunks_exact(8).map(|bytes| i64::from_le_bytes(bytes.try_into().expect("eight"))).collect()
        };
        let messages = messages(&case["messages"]).expect("all content has a Rust form");
        let ids = prompts.encode(&messages, &TemplateInputs::default()).expect("the prompt encodes");
        // The recorded ids have a picture's placeholder once per embedding. Reduce each run to one.
        let mut expected: Vec<u32> = read("input_ids").into_iter().map(|id| id as u32).collect();
        expected.dedup_by(|one, other| one == other && *one == placeholder);
        assert_eq!(expected, ids, "{name}");
        let images: usize = messages.iter().map(Message::images).sum();
        assert_eq!(images, ids.iter().filter(|&&id| id == placeholder).count(), "{name}");
    }
}
