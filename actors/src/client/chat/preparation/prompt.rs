//! The prompt of a chat: its text, tokens and pictures as the model receives them.

use std::{fmt, time::SystemTime};

use bursar_kernels::BLOCK_TOKENS;
use bursar_model::{
    error::{SamplingError, TextError},
    flow::{LayoutError, Media, MediaGrid, PromptLayout},
    processor::{MediaLimits, MediaPlan},
    text::{Message, Role, TemplateInputs, describe_tools},
};

use super::reply_rules::ReplyRules;
use crate::{
    chat::{Chat, ChatError, ToolChoice},
    engine::ModelContext,
};

/// The prompt of a chat, rendered without generating.
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Prompt {
    /// The prompt's tokens, with a placeholder for each row of a picture or video.
    pub token_ids: Vec<u32>,
    /// The number of placeholder tokens of each picture or video, in the order of the chat.
    pub picture_tokens: Vec<usize>,
}

/// Prints counts, never the tokens, because they are the user's text.
impl fmt::Debug for Prompt {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = formatter.debug_struct("Prompt");
        shown.field("token_ids", &self.token_ids.len()).field("picture_tokens", &self.picture_tokens).finish()
    }
}

/// The chat as the model receives it, and the rules by which its reply is parsed.
pub(super) struct Shown {
    pub(super) prompt: PromptLayout,
    pub(super) pictures: Vec<MediaPlan>,
    pub(super) reply: ReplyRules,
}

impl Shown {
    /// Renders and tokenizes the chat. `limit` is the maximum tokens of prompt and reply. A longer
    /// prompt is an error here only if it exceeds [`counted_max`] tokens, where tokenization stops.
    pub(super) fn of(chat: &Chat, context: &ModelContext, limit: usize) -> Result<Self, ChatError> {
        let (mut messages, visuals) = chat.split();
        let pictures = plan_pictures(context, &visuals, chat.generation.cache_salt.as_deref())?;
        let grids: Vec<MediaGrid> = pictures.iter().map(MediaPlan::grid).collect();
        let mut inputs = template_inputs(chat);
        let has_tools = |message: &Message| message.role == Role::Tool || message.tool_calls().next().is_some();
        let has_tools = inputs.tools.is_some() || messages.iter().any(has_tools);
        let is_shown = |inputs| context.prompts.template().shows_tools(inputs);
        let mut are_described = false;
        if chat.reply_format.is_none() && chat.tokens.is_none() && has_tools && !is_shown(&inputs)? {
            let tools = inputs.tools.take();
            messages = describe_tools(&messages, tools.as_deref().unwrap_or_default());
            are_described = tools.is_some();
        }
        let tokens = match &chat.tokens {
            Some(tokens) => checked_tokens(chat, context, tokens)?,
            None => {
                let written = |rendered| context.family.write_visuals(rendered, &grids);
                let tokens = context.prompts.encode_rewritten(&messages, &inputs, counted_max(limit), written);
                let tokens = counted(tokens, limit)?;
                check_known(context, &tokens, "prompt")?;
                tokens
            }
        };
        let reply = ReplyRules::of(chat, context, (&inputs, are_described), (messages.last(), &tokens))?;
        Ok(Shown { prompt: context.family.lay_out(tokens, &grids)?, pictures, reply })
    }
}

/// Renders the prompt of a chat without generating. The prompt may be longer than the context.
///
/// # Errors
/// A picture, the template or the prompt layout is invalid.
pub(super) fn prompt_of(chat: &Chat, context: &ModelContext) -> Result<Prompt, ChatError> {
    if chat.is_empty() {
        return Err(ChatError::Empty);
    }
    let Shown { prompt, pictures, .. } = Shown::of(chat, context, tokens_limit(context, usize::MAX))?;
    let rows = |plan: &MediaPlan| {
        let merge = context.family.merge();
        merge.into_iter().flat_map(|merge| plan.grid().costs(merge)).map(|cost| cost.rows).sum()
    };
    Ok(Prompt { token_ids: prompt.tokens, picture_tokens: pictures.iter().map(rows).collect() })
}

/// Maximum tokens of prompt and reply together, with a KV cache of `kv_tokens` tokens.
pub(crate) fn tokens_limit(context: &ModelContext, kv_tokens: usize) -> usize {
    let (groups, step_tokens) = (context.family.decoder().cache_groups(), context.envelope.step_tokens);
    let (tokens, blocks) = (context.envelope.context_tokens, kv_tokens / BLOCK_TOKENS);
    if groups.blocks_for(tokens, step_tokens) <= blocks { tokens } else { groups.tokens_in(blocks, step_tokens) }
}

/// Maximum number of tokens to count when a prompt may have `limit` tokens. The error for a prompt
/// that is slightly too long then gives its exact length. Counting the tokens of a prompt that is
/// much too long stops at this number, which bounds the time.
pub(super) fn counted_max(limit: usize) -> usize {
    /// Makes the count exact for small contexts too.
    const MORE: usize = 8192;
    limit.saturating_mul(2).saturating_add(MORE)
}

/// Converts the error of a count that stopped early into [`ChatError::TooLong`] with the prompt's
/// `limit`.
pub(super) fn counted(tokens: Result<Vec<u32>, TextError>, limit: usize) -> Result<Vec<u32>, ChatError> {
    tokens.map_err(|error| match error {
        TextError::TooManyTokens { limit: tokens } => ChatError::TooLong { tokens, has_more: true, limit },
        error => error.into(),
    })
}

/// Inputs of the chat template other than the turns.
fn template_inputs(chat: &Chat) -> TemplateInputs {
    TemplateInputs {
        tools: (!chat.tools.is_empty() && chat.tool_choice != ToolChoice::None).then(|| chat.tools.clone()),
        variables: chat.template_variables.clone(),
        continue_final_message: chat.continues,
        add_generation_prompt: chat.begins_turn.unwrap_or(!chat.continues),
        now_unix_seconds: now_unix_seconds(),
        ..TemplateInputs::default()
    }
}

/// Checks a prompt that was given as tokens, and returns it.
fn checked_tokens(chat: &Chat, context: &ModelContext, tokens: &[u32]) -> Result<Vec<u32>, ChatError> {
    if chat.says_more_than_tokens() {
        return Err(ChatError::TokensAndTurns);
    }
    check_known(context, tokens, "prompt")?;
    Ok(tokens.to_vec())
}

/// Refuses tokens outside the model's vocabulary. `parameter` names their source in the error.
pub(super) fn check_known(context: &ModelContext, tokens: &[u32], parameter: &'static str) -> Result<(), ChatError> {
    let vocabulary = context.family.decoder().vocabulary;
    match tokens.iter().find(|token| **token as usize >= vocabulary) {
        Some(&token) => Err(SamplingError::UnknownToken { parameter, token, vocabulary }.into()),
        None => Ok(()),
    }
}

/// The current time, for templates that include the date.
fn now_unix_seconds() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs() as i64)
}

/// Plans the sizes of pictures from their headers only. A picture outside the envelope
/// is resized or refused.
fn plan_pictures(context: &ModelContext, visuals: &[Media], salt: Option<&str>) -> Result<Vec<MediaPlan>, ChatError> {
    if visuals.is_empty() {
        return Ok(Vec::new());
    }
    // Templates of text-only models fail on pictures with unhelpful messages, so
    // refuse the pictures here.
    let processors = context.processors.as_ref().ok_or(LayoutError::TextOnly { pictures: visuals.len() })?;
    let plans = processors.plan(visuals, MediaLimits { envelope: &context.envelope, image: &context.image_limits })?;
    Ok(plans.into_iter().map(|plan| if let Some(salt) = salt { plan.salted(salt) } else { plan }).collect())
}
