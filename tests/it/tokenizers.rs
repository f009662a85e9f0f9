//! Checkpoints with a tokenizer from another folder, or with more tokens than logits.

use bursar::{Chat, ChatError, LoadOptions, ModelSource};
use bursar_model::error::SamplingError;
use serde_json::{Value, json};

use crate::{
    checkpoints::Copy,
    stage::{ask, device, runtime_on, small, story, text},
};

#[test]
fn a_tokenizer_and_its_template_may_come_from_another_folder() {
    story(async {
        let (model, tokenizer) = (Copy::of("qwen3"), Copy::of("qwen3"));
        let runtime = runtime_on(&device()).await;
        let prompt_of = async |tokenizer: Option<&Copy>| {
            let tokenizer = tokenizer.map(|copy| copy.0.path().to_owned());
            let options = LoadOptions { tokenizer, ..small() };
            let loaded = runtime.load_with(ModelSource::folder(model.0.path()), options, |_| {}).await;
            let loaded = loaded.map_err(|error| error.to_string())?;
            let prompt = loaded.prompt_of(text("Hello")).await.expect("a prompt").token_ids;
            runtime.unload(loaded.name()).await.expect("the model was loaded");
            Ok::<_, String>(prompt)
        };
        let own = prompt_of(None).await.expect("the model loads");
        tokenizer.set("tokenizer_config.json", &["chat_template"], json!("{{ messages[0].content }}"));
        let other = prompt_of(Some(&tokenizer)).await.expect("the model loads");
        assert!(other.len() < own.len(), "{other:?} is not shorter than {own:?}");
        // If a tokenizer folder is given, the model's folder needs no tokenizer.
        model.remove("tokenizer.json");
        assert_eq!(prompt_of(Some(&tokenizer)).await, Ok(other));
        tokenizer.remove("tokenizer.json");
        let error = prompt_of(Some(&tokenizer)).await.expect_err("there is no tokenizer");
        let folder = tokenizer.0.path().display().to_string();
        assert!(error.contains("tokenizer.json") && error.contains(&folder), "{error}");
        runtime.shutdown().await;
    });
}

#[test]
fn added_tokens_without_logits_are_refused_only_in_prompts() {
    story(async {
        let model = Copy::of("qwen3");
        let config: Value = serde_json::from_slice(&model.read("config.json")).expect("JSON");
        let rows = config["vocab_size"].as_u64().expect("a number");
        let mut tokenizer: Value = serde_json::from_slice(&model.read("tokenizer.json")).expect("JSON");
        let added = tokenizer["added_tokens"].as_array_mut().expect("a list");
        // Every id from `next` to `rows` is added, so that the ids of added tokens have no gaps.
        let next = added.iter().filter_map(|token| token["id"].as_u64()).max().expect("some tokens were added") + 1;
        added.extend((next..=rows).map(|id| {
            json!({"id": id, "content": format!("<|{}|>", rows - id), "special": true,
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false})
        }));
        model.write("tokenizer.json", tokenizer.to_string());
        // Make a padding token an end token too, as releases of this kind do.
        model.set("generation_config.json", &["eos_token_id"], json!([config["eos_token_id"], rows]));
        let runtime = runtime_on(&device()).await;
        let loaded = runtime.load_with(ModelSource::folder(model.0.path()), small(), |_| {}).await.expect("a model");
        ask(&loaded, text("Hello")).await.expect("an answer");
        ask(&loaded, text("Hello <|0|>")).await.expect("a user's text has no special tokens");
        let tokens = loaded.tokenize("Hello <|0|>", false).await.expect("a text");
        let error = ask(&loaded, Chat::from_tokens(tokens)).await.expect_err("the logits have no such row");
        let unknown =
            SamplingError::UnknownToken { parameter: "prompt", token: rows as u32, vocabulary: rows as usize };
        assert!(matches!(&error, ChatError::Sampling(found) if **found == unknown), "{error:?}");
        runtime.shutdown().await;
    });
}
