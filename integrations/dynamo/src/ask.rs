//! Conversion of requests from Dynamo's frontend to chats of token ids.

use bursar::{Chat, Image, OutputFormat};
use dynamo_backend_common::{
    DynamoError, GuidedDecodingOptions, MultimodalData, PreprocessedRequest, SamplingOptions, StopConditions,
};
use serde_json::Value;

use crate::fault::invalid;

/// Returns the URLs of a request's pictures, in the order of their placeholders.
pub(crate) fn pictures(request: &PreprocessedRequest) -> Result<Vec<String>, DynamoError> {
    let media = request.multi_modal_data.iter().flatten().filter(|(_, items)| !items.is_empty());
    let mut urls = Vec::new();
    for (kind, items) in media {
        if kind != "image_url" {
            return Err(invalid(format!("this worker takes only pictures, not `{kind}`")));
        }
        for item in items {
            urls.push(match item {
                MultimodalData::Url(url) => url.to_string(),
                MultimodalData::RawUrl(url) => url.clone(),
                MultimodalData::Decoded(_) => {
                    return Err(invalid("this worker decodes pictures itself; register it without a media decoder"));
                }
                MultimodalData::UuidOnly(_) => {
                    return Err(invalid("pictures are not stored by uuid; send the URL or the data of the picture"));
                }
            });
        }
    }
    Ok(urls)
}

/// Converts a request to a chat. Also returns the stop tokens that are part of the reply.
pub(crate) fn chat(request: &PreprocessedRequest, pictures: &[Image]) -> Result<(Chat, Vec<u32>), DynamoError> {
    refuse_unsupported(request)?;
    let (min, max) = pixels(request.mm_processor_kwargs.as_ref())?;
    let mut chat = Chat::from_tokens(request.token_ids.as_slice()).token_ids();
    for picture in pictures {
        chat = chat.image(picture.clone().within_pixels(min, max));
    }
    if let Some(routing) = &request.routing {
        // In Dynamo, a larger priority is more urgent. In vLLM and Bursar, a smaller
        // priority is more urgent.
        chat = chat.priority(routing.priority.map(i32::saturating_neg));
        chat = routing.cache_namespace.iter().fold(chat, Chat::cache_salt);
    }
    if let Some(guided) = &request.sampling_options.guided_decoding {
        chat = chat.format(form(guided)?);
    }
    // Dynamo's `logprobs` and `log_probabilities` both count the alternatives that are listed in
    // addition to the chosen token.
    chat = chat.log_probabilities(request.output_options.logprobs.map(|top| top as usize));
    Ok(stops(&request.stop_conditions, sampled(&request.sampling_options, chat)))
}

/// Refuses options that would change the reply and that this worker does not support.
fn refuse_unsupported(request: &PreprocessedRequest) -> Result<(), DynamoError> {
    let sampling = &request.sampling_options;
    let asked = [
        (request.prompt_embeds.is_some(), "`prompt_embeds`"),
        (request.prefill_result.is_some() || request.bootstrap_info.is_some(), "prompts that another worker computed"),
        (request.encoder_result.is_some(), "pictures that another worker encoded"),
        (request.routing.as_ref().is_some_and(|routing| routing.lora_name.is_some()), "adapters"),
        (sampling.n.is_some_and(|n| n > 1) || sampling.best_of.is_some_and(|n| n > 1), "more than one reply (`n`)"),
        (sampling.use_beam_search == Some(true), "beam search"),
        (request.stop_conditions.max_thinking_tokens.is_some(), "`max_thinking_tokens`"),
        (request.output_options.prompt_logprobs.is_some(), "`prompt_logprobs`"),
    ];
    match asked.into_iter().find(|(is_asked, _)| *is_asked) {
        Some((_, what)) => Err(invalid(format!("this worker does not serve {what}"))),
        None => Ok(()),
    }
}

/// `min_pixels` and `max_pixels` of `mm_processor_kwargs`.
fn pixels(kwargs: Option<&Value>) -> Result<(Option<u64>, Option<u64>), DynamoError> {
    let number = |name: &str| match kwargs.and_then(|kwargs| kwargs.get(name)) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => value.as_u64().map(Some).ok_or_else(|| invalid(format!("`{name}` must be a whole number"))),
    };
    Ok((number("min_pixels")?, number("max_pixels")?))
}

fn sampled(asked: &SamplingOptions, mut chat: Chat) -> Chat {
    chat = chat.temperature(asked.temperature.map(shortest));
    chat = chat.top_p(asked.top_p.map(shortest));
    chat = chat.min_p(asked.min_p.map(shortest));
    chat = chat.presence_penalty(asked.presence_penalty.map(shortest));
    chat = chat.frequency_penalty(asked.frequency_penalty.map(shortest));
    chat = chat.repetition_penalty(asked.repetition_penalty.map(shortest));
    chat = chat.top_k(asked.top_k.map(|top_k| usize::try_from(top_k).unwrap_or(0)));
    chat.seed(asked.seed.map(|seed| seed as u64))
}

/// Converts to the f64 with the shortest decimal form of `value`, as the client typed it. A direct
/// conversion to f64 would show more digits of the nearest 32-bit number.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

/// Sets stop tokens and limits. With `ignore_eos`, stop tokens are ignored too. The frontend
/// handles stop strings, because it has the text.
fn stops(asked: &StopConditions, mut chat: Chat) -> (Chat, Vec<u32>) {
    chat = chat.max_tokens(asked.max_tokens.map(|most| most as usize));
    chat = chat.min_tokens(asked.min_tokens.map(|least| least as usize));
    if asked.ignore_eos == Some(true) {
        return (chat.ignore_end(), Vec::new());
    }
    let visible = asked.stop_token_ids_visible.clone().unwrap_or_default();
    let hidden = asked.stop_token_ids.iter().chain(&asked.stop_token_ids_hidden).flatten();
    let chat = hidden.chain(&visible).fold(chat, |chat, token| chat.stop_token(*token));
    (chat, visible)
}

fn form(guided: &GuidedDecodingOptions) -> Result<Option<OutputFormat>, DynamoError> {
    if guided.grammar.is_some() || guided.structural_tag.is_some() {
        return Err(invalid("a reply can follow only a JSON schema, a regular expression or a choice"));
    }
    Ok(match (&guided.json, &guided.regex, &guided.choice) {
        (Some(Value::String(text)), ..) => {
            let schema = serde_json::from_str(text).map_err(|_| invalid("`guided_json` is not valid JSON"))?;
            Some(OutputFormat::json(schema))
        }
        (Some(schema), ..) => Some(OutputFormat::json(schema.clone())),
        (None, Some(regex), _) => Some(OutputFormat::Regex(regex.clone())),
        (None, None, Some(choice)) => Some(OutputFormat::Choice(choice.clone())),
        (None, None, None) => None,
    })
}
