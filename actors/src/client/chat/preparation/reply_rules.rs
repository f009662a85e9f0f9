//! Rules for parsing a chat's reply, and the grammar that the reply must follow.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

use bursar_model::{
    error::ReplyFormError,
    sampling::{ForcedCalls, Grammar, NotFollowed, ReplyForm},
    text::{Message, ReplyFormat, ReplyParser, TemplateInputs, Thinking, ToolFormat},
};

use crate::{
    chat::{Chat, ChatError, ToolChoice, ToolError},
    engine::ModelContext,
};

/// Number of tokens at the end of the prompt that are decoded to find out whether the prompt opens
/// the reasoning: enough for a tag and the white space around it.
const END_TOKENS: usize = 24;

/// Rules for parsing the replies to one chat.
#[derive(Clone)]
pub(crate) struct ReplyRules {
    /// A parser in its initial state.
    pub(crate) parser: ReplyParser,
    /// Special tokens that the parser needs, so the detokenizer must keep them.
    pub(crate) tags: Vec<&'static str>,
    /// Number of complete tool calls after which the reply ends.
    pub(crate) calls_max: usize,
    /// `true` if a call is forced. Any text is then the beginning of a call that was cut off.
    pub(crate) is_forced: bool,
    tools: ToolFormat,
    thinking: Thinking,
}

impl ReplyRules {
    /// Creates the rules for a chat. `last` is the chat's last turn, if there are turns, and
    /// `tokens` are the tokens of its prompt. `are_described` is `true` if the tools were
    /// [described](bursar_model::text::describe_tools) in a system message instead of shown by the
    /// template.
    ///
    /// # Errors
    /// [`ChatError::Tools`], [`ChatError::Text`].
    pub(crate) fn of(
        chat: &Chat,
        context: &ModelContext,
        (inputs, are_described): (&TemplateInputs, bool),
        (last, tokens): (Option<&Message>, &[u32]),
    ) -> Result<Self, ChatError> {
        let (template, tokenizer) = (context.prompts.template(), context.prompts.tokenizer());
        let format = match (chat.reply_format, &chat.tokens) {
            (Some(format), _) => format,
            // No template rendered this prompt, so no template shows how the reply is written.
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
        // A prompt given as tokens may contain tools that the chat itself does not list.
        let may_call =
            inputs.tools.is_some() || are_described || (chat.tokens.is_some() && chat.tool_choice != ToolChoice::None);
        let tools = if may_call { format.tools } else { ToolFormat::None };
        Ok(ReplyRules {
            parser: ReplyParser::new(thinking, tools, chat.named_tools()),
            tags: [&thinking.tokens(), tools.tags()].concat(),
            calls_max: if chat.is_parallel() { usize::MAX } else { 1 },
            is_forced: matches!(chat.tool_choice, ToolChoice::Required | ToolChoice::Named(_)),
            tools,
            thinking,
        })
    }

    /// Compiles the grammar that the reply must follow, if there is one.
    ///
    /// # Errors
    /// [`ChatError::Format`], [`ChatError::Tools`].
    pub(crate) fn grammar(&self, chat: &Chat, context: &ModelContext) -> Result<Option<Grammar>, ChatError> {
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
        match self.tools {
            ToolFormat::None => return Err(ToolError::NoFormat.into()),
            // The calls contain special tokens, which no grammar can contain.
            ToolFormat::Gemma4 => return Err(ToolError::ForcingUnsupported.into()),
            ToolFormat::Hermes | ToolFormat::Llama3Json | ToolFormat::QwenXml => {}
        }
        Ok((indices, ForcedCalls { format: self.tools, tools, is_parallel: chat.is_parallel() }))
    }
}

/// Logs schema keywords that are not enforced. Each keyword is logged only once, because callers
/// send the same schemas again and again.
fn tell_once(left: &[NotFollowed]) {
    static TOLD: Mutex<BTreeSet<&str>> = Mutex::new(BTreeSet::new());
    for one in left {
        if TOLD.lock().unwrap_or_else(PoisonError::into_inner).insert(one.keyword) {
            tracing::warn!("a JSON schema has {one}, which is not enforced; later uses of this keyword are not logged");
        }
    }
}
