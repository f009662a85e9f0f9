//! Token usage of a request in OpenAI's format.

use std::iter::Sum;

use schemars::JsonSchema;
use serde::Serialize;

use bursar::Usage;

/// Token counts of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct UsageBody {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptTokens,
    completion_tokens_details: CompletionTokens,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
struct PromptTokens {
    cached_tokens: usize,
    /// Tokens of pictures and videos, as in vLLM and SGLang.
    image_tokens: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
struct CompletionTokens {
    reasoning_tokens: usize,
}

impl UsageBody {
    /// Prompt tokens, prompt tokens from the prefix cache, and completion tokens.
    pub(crate) fn counts(&self) -> [usize; 3] {
        [self.prompt_tokens, self.prompt_tokens_details.cached_tokens, self.completion_tokens]
    }

    /// Sums the usage of the samples of one prompt. The prompt is counted once.
    pub(crate) fn of(samples: impl IntoIterator<Item = Usage>) -> Self {
        let mut found = UsageBody::default();
        for (index, usage) in samples.into_iter().enumerate() {
            found.prompt_tokens = usage.prompt_tokens;
            found.prompt_tokens_details.image_tokens = usage.picture_tokens;
            // The other samples find the prompt in the prefix cache, because the
            // first sample computed it.
            if index == 0 {
                found.prompt_tokens_details.cached_tokens = usage.cached_tokens;
            }
            found.completion_tokens += usage.completion_tokens;
            found.completion_tokens_details.reasoning_tokens += usage.reasoning_tokens;
        }
        found.total_tokens = found.prompt_tokens + found.completion_tokens;
        found
    }
}

/// Sums the usage of several prompts.
impl Sum for UsageBody {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(UsageBody::default(), |mut sum, usage| {
            sum.prompt_tokens += usage.prompt_tokens;
            sum.completion_tokens += usage.completion_tokens;
            sum.total_tokens += usage.total_tokens;
            sum.prompt_tokens_details.cached_tokens += usage.prompt_tokens_details.cached_tokens;
            sum.prompt_tokens_details.image_tokens += usage.prompt_tokens_details.image_tokens;
            sum.completion_tokens_details.reasoning_tokens += usage.completion_tokens_details.reasoning_tokens;
            sum
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prompt_of_several_samples_counts_once() {
        let mut first = Usage::default();
        (first.prompt_tokens, first.picture_tokens, first.completion_tokens) = (10, 4, 3);
        let mut second = first;
        (second.cached_tokens, second.completion_tokens) = (10, 5);
        let json = serde_json::to_value(UsageBody::of([first, second])).expect("JSON");
        assert_eq!(json["total_tokens"], 18);
        assert_eq!(json["prompt_tokens_details"]["cached_tokens"], 0);
    }
}
