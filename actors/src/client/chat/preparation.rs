//! Preparation of a chat: the chat is checked against the envelope and turned into tokens, before
//! any picture is decoded and any request is queued.

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    sync::Arc,
    time::SystemTime,
};

use bursar_model::{
    RequestCost,
    error::{SamplingError, TextError},
    flow::{LayoutError, Media, MediaGrid, PrefixKeys, PromptLayout},
    processor::{MediaLimits, MediaPlan},
    sampling::{Grammar, Sampler, TOP_LOG_PROBABILITIES_MAX},
    text::{Message, Role, StopRules, TemplateInputs, describe_tools},
};

use super::{Chat, ChatError, Prompt, ToolChoice, reply_rules::ReplyRules, scheduling::ChatScheduling};
use crate::engine::ModelContext;

/// A chat that passed all checks.
#[derive(Clone)]
pub(super) struct Preparation {
    pub(super) prompt: Arc<PromptLayout>,
    pub(super) pictures: Vec<MediaPlan>,
    pub(super) tokens_min: usize,
    pub(super) tokens_max: usize,
    pub(super) stop: StopRules,
    pub(super) stop_tokens: Arc<[u32]>,
    /// End tokens from the model's `generation_config.json`; empty if the chat ignores them.
    own_ends: Arc<[u32]>,
    pub(super) sampler: Arc<Sampler>,
    /// Distinct prompt tokens for the repetition penalty; empty if the sampler does
    /// not read the prompt.
    pub(super) prompt_read: Arc<[u32]>,
    pub(super) score_prompt: Option<usize>,
    /// The prompt's tokens, if the caller asked for token ids.
    pub(super) told_ids: Option<Arc<[u32]>>,
    pub(super) standing: ChatScheduling,
    pub(super) reply: ReplyRules,
    /// Keys of the prompt's blocks in the prefix cache. Empty at first; the driver adds the tokens.
    pub(super) prefix: PrefixKeys,
}

impl Preparation {
    /// Prepares `samples` replies to one chat. Each sample's seed is one higher than
    /// the seed before it.
    ///
    /// # Errors
    /// Anything outside the envelope, with the limit, the value and a hint.
    pub(super) fn of(
        chat: &Chat,
        context: &ModelContext,
        kv_tokens: usize,
        samples: usize,
    ) -> Result<Vec<Self>, ChatError> {
        let asked = &chat.generation;
        if chat.is_empty() {
            return Err(ChatError::Empty);
        }
        chat.standing.check()?;
        if asked.tokens_max == Some(0) {
            return Err(ChatError::NoTokens);
        }
        let own_ends: Arc<[u32]> = context.generation.eos_ids.iter().copied().filter(|_| !asked.ignores_end).collect();
        let ends = own_ends.iter().chain(&asked.stop_tokens);
        let stop = StopRules::new(ends.copied(), asked.stop.clone())?;
        let stop_tokens: Arc<[u32]> = stop.ids().collect();
        let shown = Shown::of(chat, context, tokens_limit(context, kv_tokens))?;
        let tokens_max = tokens_max(chat, context, &shown, kv_tokens)?;
        let Shown { prompt, pictures, reply } = shown;
        // Compiling a grammar takes the most time, so the grammar is compiled after the checks that
        // can refuse a chat at once.
        let samplers = samplers(chat, context, reply.grammar(chat, context)?, &stop_tokens, samples)?;
        // All samples share the same prompt tokens.
        let prompt_read = samplers.first().map_or_else(|| [].into(), |sampler| sampler.read_of(&prompt.tokens));
        let told_ids = asked.token_ids.then(|| prompt.tokens.as_slice().into());
        let prompt = Arc::new(prompt);
        let prefix = PrefixKeys::of(context.cache, asked.cache_salt.as_deref());
        let prepared = samplers.into_iter().enumerate().map(|(sample, sampler)| Preparation {
            prompt: prompt.clone(),
            pictures: pictures.clone(),
            tokens_min: asked.tokens_min,
            tokens_max,
            stop: stop.clone(),
            stop_tokens: stop_tokens.clone(),
            own_ends: own_ends.clone(),
            sampler: Arc::new(sampler),
            prompt_read: prompt_read.clone(),
            standing: chat.standing.clone(),
            // Log-probabilities of the prompt are the same for all samples, so only the
            // first one computes them.
            score_prompt: asked.prompt_log_probabilities.filter(|_| sample == 0),
            told_ids: told_ids.clone(),
            reply: reply.clone(),
            prefix: prefix.clone(),
        });
        Ok(prepared.collect())
    }

    /// Returns `true` if this end token was set by the chat and is not one of the model's own.
    pub(super) fn is_asked_end(&self, token: u32) -> bool {
        !self.own_ends.contains(&token)
    }
}

/// The chat as the model receives it, and the rules by which its reply is parsed.
struct Shown {
    prompt: PromptLayout,
    pictures: Vec<MediaPlan>,
    reply: ReplyRules,
}

impl Shown {
    /// Renders and tokenizes the chat. Counts at most [`counted_max`] tokens for `limit`.
    fn of(chat: &Chat, context: &ModelContext, limit: usize) -> Result<Self, ChatError> {
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

/// Maximum tokens of prompt and reply together.
pub(super) fn tokens_limit(context: &ModelContext, kv_tokens: usize) -> usize {
    RequestCost::largest(&context.envelope, context.family.merge()).tokens.min(kv_tokens)
}

/// Maximum number of tokens to count when a prompt may have `limit` tokens. The error for a prompt
/// that is slightly too long gives its exact length. For a prompt that is much too long, counting
/// stops here and takes no more time.
pub(super) fn counted_max(limit: usize) -> usize {
    /// Makes the count exact for small contexts too.
    const MORE: usize = 8192;
    limit.saturating_mul(2).saturating_add(MORE)
}

/// Converts the error for a count that was stopped into [`ChatError::TooLong`]
/// with the prompt's `limit`.
pub(super) fn counted(tokens: Result<Vec<u32>, TextError>, limit: usize) -> Result<Vec<u32>, ChatError> {
    tokens.map_err(|error| match error {
        TextError::TooManyTokens { limit: tokens } => ChatError::TooLong { tokens, has_more: true, limit },
        error => error.into(),
    })
}

/// Maximum tokens of the reply: the chat's `max_tokens`, but no more than the prompt
/// leaves of the context.
fn tokens_max(chat: &Chat, context: &ModelContext, shown: &Shown, kv_tokens: usize) -> Result<usize, ChatError> {
    let asked = &chat.generation;
    let merge = context.family.merge();
    let largest = RequestCost::largest(&context.envelope, merge);
    let limit = tokens_limit(context, kv_tokens);
    let count = shown.prompt.tokens.len();
    if count == 0 || count >= limit {
        return Err(ChatError::TooLong { tokens: count, has_more: false, limit });
    }
    let tokens_max = asked.tokens_max.unwrap_or(usize::MAX).min(limit - count);
    if asked.tokens_min > tokens_max {
        return Err(ChatError::MinTokens { tokens_min: asked.tokens_min, tokens_max });
    }
    let pictures = shown.pictures.iter();
    let costs = merge.into_iter().flat_map(|merge| pictures.clone().flat_map(move |plan| plan.grid().costs(merge)));
    let cost = RequestCost::of(count + tokens_max, costs);
    // Inputs outside the envelope were resized or refused above, as rule 3 requires, so this can
    // fail only because of a bug.
    assert!(cost.is_within(&largest), "a request of {cost:?} was let in where {largest:?} was stressed");
    Ok(tokens_max)
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

/// Creates one sampler per sample, because a grammar tracks the progress of its own sample.
fn samplers(
    chat: &Chat,
    context: &ModelContext,
    grammar: Option<Grammar>,
    ends: &Arc<[u32]>,
    samples: usize,
) -> Result<Vec<Sampler>, ChatError> {
    let asked = &chat.generation;
    let vocabulary = context.family.decoder().vocabulary;
    check_known(context, &asked.stop_tokens, "stop_token_ids")?;
    if let Some(top) = asked.prompt_log_probabilities.filter(|top| *top > TOP_LOG_PROBABILITIES_MAX) {
        return Err(SamplingError::TooManyLogProbabilities { asked: top, limit: TOP_LOG_PROBABILITIES_MAX }.into());
    }
    if grammar.is_some() && asked.ignores_end {
        return Err(ChatError::FormatWithoutEnd);
    }
    let seed = asked.seed.unwrap_or_else(any_number);
    let sampler = |sample: usize| {
        let params = asked.sampling(&context.generation.sampling, seed.wrapping_add(sample as u64));
        let mut sampler = Sampler::new(params, vocabulary)?.with_tokens_min(asked.tokens_min, ends.clone())?;
        if let Some(grammar) = &grammar {
            sampler = sampler.with_grammar(grammar.clone());
        }
        if let Some(top) = asked.log_probabilities {
            sampler = sampler.with_log_probabilities(top)?;
        }
        Ok(sampler)
    };
    (0..samples).map(sampler).collect()
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

/// A random number for a seed or an id, from the standard library's random source for hash maps.
pub(super) fn any_number() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests;
