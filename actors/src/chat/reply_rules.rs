//! How a chat's reply is read, and what form it must have.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

use bursar_model::{
    error::ReplyFormError,
    sampling::{ForcedCalls, Grammar, NotFollowed, ReplyForm},
    text::{Message, ReplyFormat, ReplyParser, TemplateInputs, Thinking, ToolFormat},
};

use super::{Chat, ChatError, ToolChoice, tool_choice::ToolError};
use crate::engine::ModelContext;

/// The last tokens of a prompt: enough to spell a tag and white space around it.
const END_TOKENS: usize = 24;

/// How the replies to one chat are read.
#[derive(Clone)]
pub(super) struct ReplyRules {
    /// A parser that has read nothing.
    pub(super) parser: ReplyParser,
    /// Special tokens that the parser has to see.
    pub(super) tags: Vec<&'static str>,
    /// After this many whole calls the reply ends.
    pub(super) calls_max: usize,
    /// A call is forced, so that text is the beginning of one that was cut off.
    pub(super) is_forced: bool,
    tools: ToolFormat,
    thinking: Thinking,
}

impl ReplyRules {
    /// The rules for a chat with this last turn, if it has turns, whose prompt has these `tokens`. Its tools may be
    /// [described](bursar_model::text::describe_tools) to the model, instead of shown by the template.
    ///
    /// # Errors
    /// [`ChatError::Tools`], [`ChatError::Text`].
    pub(super) fn of(
        chat: &Chat,
        context: &ModelContext,
        (inputs, are_described): (&TemplateInputs, bool),
        (last, tokens): (Option<&Message>, &[u32]),
    ) -> Result<Self, ChatError> {
        let (template, tokenizer) = (context.prompts.template(), context.prompts.tokenizer());
        let format = match (chat.reply_format, &chat.tokens) {
            (Some(format), _) => format,
            // No template wrote this prompt, so none tells how the reply is written.
            (None, Some(_)) => ReplyFormat::default(),
            (None, None) if are_described => {
                ReplyFormat { tools: ToolFormat::Hermes, ..template.reply_format(inputs)? }
            }
            (None, None) => template.reply_format(inputs)?,
        };
        let end = tokenizer.decode(&tokens[tokens.len().saturating_sub(END_TOKENS)..], false)?;
        let thinking = match last.filter(|_| inputs.continue_final_message) {
            Some(turn) => format.reasoning.continuing(turn, &end),
            None => format.reasoning.after(&end),
        };
        // Tokens may show tools that nobody else names.
        let may_call =
            inputs.tools.is_some() || are_described || (chat.tokens.is_some() && chat.tool_choice != ToolChoice::None);
        let tools = if may_call { format.tools } else { ToolFormat::None };
        Ok(ReplyRules {
            parser: ReplyParser::new(thinking, tools, chat.tool_names()),
            tags: [thinking.tags(), tools.tags()].concat(),
            calls_max: if chat.is_parallel() { usize::MAX } else { 1 },
            is_forced: matches!(chat.tool_choice, ToolChoice::Required | ToolChoice::Named(_)),
            tools,
            thinking,
        })
    }

    /// The grammar of the reply, if it must have a form.
    ///
    /// # Errors
    /// [`ChatError::Format`], [`ChatError::Tools`].
    pub(super) fn grammar(&self, chat: &Chat, context: &ModelContext) -> Result<Option<Grammar>, ChatError> {
        let format = chat.generation.format.clone();
        let (indices, form) = match (&chat.tool_choice, format) {
            (ToolChoice::Required | ToolChoice::Named(_), Some(_)) => return Err(ToolError::WithFormat.into()),
            (ToolChoice::Required | ToolChoice::Named(_), None) => {
                let (indices, calls) = self.forced(chat)?;
                (indices, ReplyForm::Calls(calls))
            }
            (_, Some(format)) if self.tools != ToolFormat::None && !chat.tools.is_empty() => {
                let (indices, calls) = self.forced(chat)?;
                (indices, ReplyForm::FormatOrCalls(format, calls))
            }
            (_, Some(format)) => (Vec::new(), ReplyForm::Format(format)),
            (_, None) => return Ok(None),
        };
        tell_once(&form.not_followed());
        let compiler = context.grammars().map_err(ChatError::Format)?;
        let compiled = compiler.compile_reply(&form, self.thinking);
        compiled.map(Some).map_err(|ReplyFormError { tool, source }| match tool {
            Some(tool) => ToolError::Schema { index: indices[tool], source: source.into() }.into(),
            None => source.into(),
        })
    }

    fn forced(&self, chat: &Chat) -> Result<(Vec<usize>, ForcedCalls), ChatError> {
        let (indices, tools) = chat.callable_tools()?.into_iter().unzip();
        if self.tools == ToolFormat::None {
            return Err(ToolError::NoFormat.into());
        }
        Ok((indices, ForcedCalls { format: self.tools, tools, is_parallel: chat.is_parallel() }))
    }
}

/// Logs keywords that are left to the model, each the first time: callers send the same schemas again and again.
fn tell_once(left: &[NotFollowed]) {
    static TOLD: Mutex<BTreeSet<&str>> = Mutex::new(BTreeSet::new());
    for one in left {
        if TOLD.lock().unwrap_or_else(PoisonError::into_inner).insert(one.keyword) {
            tracing::warn!("a JSON schema has {one}, which is not enforced; later uses of this keyword are not logged");
        }
    }
}
