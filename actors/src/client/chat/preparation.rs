//! Preparation of a chat: the chat is checked against the envelope and turned into tokens, before
//! any picture is decoded and any request is queued.

mod pictures;
mod prompt;
mod prompt_leader;
mod reply_rules;
mod tokens;
mod tools;

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    sync::Arc,
};

use bursar_model::{
    RequestCost,
    error::SamplingError,
    flow::{PrefixKeys, PromptLayout},
    processor::MediaPlan,
    sampling::{Grammar, Sampler, TOP_LOG_PROBABILITIES_MAX},
    text::StopRules,
};

pub use self::prompt::Prompt;
pub(crate) use self::{
    pictures::RequestPictures,
    prompt::tokens_limit,
    prompt_leader::{Lead, LeaderRole},
};
use self::{
    prompt::{Shown, check_known},
    reply_rules::ReplyRules,
};
use super::{Chat, ChatError, request::ChatScheduling};
use crate::engine::ModelContext;

/// A chat that passed all checks.
#[derive(Clone)]
pub(crate) struct Preparation {
    pub(crate) prompt: Arc<PromptLayout>,
    pub(crate) pictures: Vec<MediaPlan>,
    pub(crate) tokens_min: usize,
    pub(crate) tokens_max: usize,
    pub(crate) stop: StopRules,
    pub(crate) stop_tokens: Arc<[u32]>,
    /// End tokens from the model's `generation_config.json`; empty if the chat ignores them.
    own_ends: Arc<[u32]>,
    pub(crate) sampler: Arc<Sampler>,
    /// Distinct prompt tokens for the repetition penalty; empty if the sampler does
    /// not read the prompt.
    pub(crate) prompt_read: Arc<[u32]>,
    pub(crate) score_prompt: Option<usize>,
    /// The prompt's tokens, if the caller asked for token ids.
    pub(crate) prompt_ids: Option<Arc<[u32]>>,
    pub(crate) scheduling: ChatScheduling,
    pub(crate) reply: ReplyRules,
    /// Keys of the prompt's blocks in the prefix cache. Empty until the driver hashes the prompt.
    pub(crate) prefix: PrefixKeys,
}

impl Preparation {
    /// Prepares `samples` replies to one chat. Each sample's seed is one higher than
    /// the seed before it.
    ///
    /// # Errors
    /// Anything outside the envelope, with the limit, the value and a hint.
    pub(crate) fn of(
        chat: &Chat,
        context: &ModelContext,
        kv_tokens: usize,
        samples: usize,
    ) -> Result<Vec<Self>, ChatError> {
        let asked = &chat.generation;
        if chat.is_empty() {
            return Err(ChatError::Empty);
        }
        chat.scheduling.check()?;
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
        // Compiling a grammar takes the most time, so the grammar is compiled only after the prompt
        // has been accepted.
        let samplers = samplers(chat, context, reply.grammar(chat, context)?, &stop_tokens, samples)?;
        // All samples share the same prompt tokens.
        let prompt_read = samplers.first().map_or_else(|| [].into(), |sampler| sampler.read_of(&prompt.tokens));
        let prompt_ids = asked.token_ids.then(|| prompt.tokens.as_slice().into());
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
            scheduling: chat.scheduling.clone(),
            // Log-probabilities of the prompt are the same for all samples, so only the first
            // sample computes them.
            score_prompt: asked.prompt_log_probabilities.filter(|_| sample == 0),
            prompt_ids: prompt_ids.clone(),
            reply: reply.clone(),
            prefix: prefix.clone(),
        });
        Ok(prepared.collect())
    }

    /// Returns `true` if only the chat makes this token an end token: the model has no such end
    /// token, or the chat ignores the model's end tokens.
    pub(crate) fn is_asked_end(&self, token: u32) -> bool {
        !self.own_ends.contains(&token)
    }
}

/// Returns the maximum tokens of the reply: the chat's `max_tokens`, or the tokens that the
/// prompt leaves in the context if there are fewer.
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
    // Rule 3 (docs/rules.md): inputs outside the envelope are resized or refused. The calls above
    // have done so, and only a bug can make this assertion fail.
    assert!(cost.is_within(&largest), "a request of {cost:?} was admitted although the stressed limit is {largest:?}");
    Ok(tokens_max)
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

/// A random number for a seed or an id, from the standard library's random source for hash maps.
pub(crate) fn any_number() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests;
