//! The number of reasoning tokens in a reply, from the state of its parser before
//! and after each token.

use bursar_model::text::ReplyPlace;

/// Counts the tokens between the reasoning tags as they arrive. Tokens of the tags are not counted.
#[derive(Default)]
pub(super) struct ReasoningCount {
    tokens: usize,
    /// Number of the latest tokens that may belong to the closing tag of the reasoning.
    undecided: usize,
}

impl ReasoningCount {
    /// Counts a token that moved the parser from `before` to `after`.
    pub(super) fn token(&mut self, before: ReplyPlace, after: ReplyPlace) {
        match (before, after) {
            (ReplyPlace::Answer, _) => {}
            (_, ReplyPlace::Answer) => self.undecided = 0,
            (_, ReplyPlace::MaybeTag) => self.undecided += 1,
            (_, ReplyPlace::Reasoning) => self.tokens += 1 + std::mem::take(&mut self.undecided),
        }
    }

    /// The number of reasoning tokens at the end of the reply. An incomplete closing
    /// tag counts as reasoning.
    pub(super) fn tokens(&self) -> usize {
        self.tokens + self.undecided
    }
}

#[cfg(test)]
mod tests {
    use bursar_model::text::{ReasoningTags, ReplyParser, Thinking, ToolFormat};

    use super::*;

    const POSSIBLE: Thinking = Thinking::Possible(ReasoningTags::THINK);
    const BEGUN: Thinking = Thinking::Begun(ReasoningTags::THINK);

    /// Counts the reasoning tokens among `tokens`.
    fn counted(thinking: Thinking, tokens: &[&str]) -> usize {
        let mut parser = ReplyParser::new(thinking, ToolFormat::None, []);
        let mut count = ReasoningCount::default();
        for token in tokens {
            let before = parser.place();
            parser.feed(token);
            count.token(before, parser.place());
        }
        count.tokens()
    }

    #[test]
    fn reasoning_tokens_exclude_the_tags_around_them() {
        let reply = ["<think>", "\n", "One", " two", ".", "\n", "</think>", "\n\n", "Three", "."];
        assert_eq!(counted(POSSIBLE, &reply), 5);
        assert_eq!(counted(BEGUN, &reply[2..]), 4, "the prompt contains the opening tag");
        assert_eq!(counted(BEGUN, &reply), 6, "with the opening tag in the prompt, a second one counts as text");
        assert_eq!(counted(POSSIBLE, &reply[7..]), 0, "a reply without an opening tag has no reasoning");
        assert_eq!(counted(Thinking::Off, &reply), 0);
    }

    #[test]
    fn split_tags_count_as_reasoning_only_when_incomplete() {
        let spelled = ["<", "think", ">", "a", "</", "think", ">", "b"];
        assert_eq!(counted(POSSIBLE, &spelled), 1);
        assert_eq!(counted(BEGUN, &["a", "</", "thing", ">", "</think>", "b"]), 4);
        assert_eq!(counted(BEGUN, &["a", "</", "think"]), 3, "the reply was cut off during reasoning");
    }
}
