//! Lark rules of a whole reply, and the grammars that they refer to.

use std::fmt::Write;

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::json;

use super::{error::GrammarError, output_format::OutputFormat};
use crate::text::Thinking;

/// The Lark rules collected so far, and the grammars that they refer to.
#[derive(Default)]
pub(super) struct LarkRules {
    /// Rules, each on a separate line.
    pub(super) text: String,
    parts: Vec<(OutputFormat, GrammarWithLexer)>,
    tokens: Vec<String>,
}

impl LarkRules {
    /// Adds a form as a separate grammar, once. Returns the reference to use in rules.
    pub(super) fn part(&mut self, form: &OutputFormat) -> Result<String, GrammarError> {
        let reference = |index: usize| format!("@part{index}");
        if let Some(index) = self.parts.iter().position(|(known, _)| known == form) {
            return Ok(reference(index));
        }
        let part = form.grammar()?.grammars.into_iter().next().ok_or(GrammarError::TooComplex)?;
        let index = self.parts.len();
        self.parts.push((form.clone(), GrammarWithLexer { name: Some(format!("part{index}")), ..part }));
        Ok(reference(index))
    }

    /// Adds a token with this definition, once. Returns its name.
    pub(super) fn token(&mut self, definition: String) -> String {
        let known = self.tokens.iter().position(|token| *token == definition);
        let index = known.unwrap_or_else(|| {
            self.tokens.push(definition);
            self.tokens.len() - 1
        });
        format!("TOKEN{index}")
    }

    /// The grammar of a reply that has the form `body` after its reasoning.
    pub(super) fn finish(mut self, thinking: Thinking, body: &str) -> TopLevelGrammar {
        let thoughts = match thinking {
            Thinking::Off => String::new(),
            Thinking::Possible(tags) => format!("({} thoughts)? ", literal(tags.begin)),
            Thinking::Begun(_) => "thoughts ".to_owned(),
        };
        if let Thinking::Possible(tags) | Thinking::Begun(tags) = thinking {
            self.text += "thoughts: thought (\"\\n\" | \"\\n\\n\")?\n";
            let _ = writeln!(self.text, "thought[suffix={}]: /(?s:.*)/", literal(tags.end));
        }
        for (index, token) in self.tokens.iter().enumerate() {
            let _ = writeln!(self.text, "TOKEN{index}: {token}");
        }
        let rules = format!("start: {thoughts}({body})\n{}", self.text);
        let mut grammars = vec![GrammarWithLexer::from_lark(rules)];
        grammars.extend(self.parts.into_iter().map(|(_, grammar)| grammar));
        TopLevelGrammar { grammars, max_tokens: None }
    }
}

/// A text as a Lark string. Lark uses JSON's escapes.
pub(super) fn literal(text: &str) -> String {
    json!(text).to_string()
}
