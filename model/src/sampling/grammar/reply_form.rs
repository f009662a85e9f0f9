//! The form of a whole reply: reasoning first, then the caller's form or tool calls.

use std::fmt::Write;

use llguidance::api::TopLevelGrammar;
use serde_json::Value;

use super::{
    error::{GrammarError, ReplyFormError},
    lark_rules::{LarkRules, literal},
    output_format::{JsonWhitespace, OutputFormat, SCHEMA_BYTES_MAX, require, schema_bytes},
    rewritten_schema::NotFollowed,
    xml_call_rules::{self, XmlCallRules},
};
use crate::text::{CallableTool, Thinking, ToolFormat};

// Maximum number of tools to choose among, and maximum bytes of all their schemas.
const TOOLS_MAX: usize = 128;
const TOOLS_BYTES_MAX: usize = 4 * SCHEMA_BYTES_MAX;
/// Maximum bytes of a tool's name. OpenAI's API allows 64.
const NAME_BYTES_MAX: usize = 256;
/// Maximum calls in one reply, because a model might never stop calling tools.
const CALLS_MAX: usize = 16;

/// Calls that a reply must consist of.
#[derive(Clone, Debug, PartialEq)]
pub struct ForcedCalls {
    /// The format in which the model writes a call. With [`ToolFormat::None`] and
    /// [`ToolFormat::Gemma4`], no call can be forced.
    pub format: ToolFormat,
    /// The tools that a call may choose from.
    pub tools: Vec<CallableTool>,
    /// Whether a reply may have more than one call: up to 16, in formats that support several
    /// calls.
    pub is_parallel: bool,
}

impl ForcedCalls {
    /// Checks a number of tools. Callers can thus refuse too many tools before copying them.
    ///
    /// # Errors
    /// [`GrammarError::TooLarge`] above 128.
    pub fn check_count(tools: usize) -> Result<(), GrammarError> {
        require("list of tools", tools, "entries", TOOLS_MAX)
    }
}

/// The form of a reply after its reasoning.
#[derive(Clone, Debug, PartialEq)]
pub enum ReplyForm {
    Format(OutputFormat),
    Calls(ForcedCalls),
    FormatOrCalls(OutputFormat, ForcedCalls),
}

impl ReplyForm {
    /// A part that can be refused separately: the arguments of the tool with this index, or the
    /// caller's form if `tool` is `None`.
    pub(super) fn part(&self, tool: Option<usize>) -> Option<OutputFormat> {
        match tool {
            Some(index) => self.tools().get(index).map(arguments),
            None => self.format().cloned(),
        }
    }

    /// The schema keywords that a reply may violate, because no grammar can enforce them.
    pub fn not_followed(&self) -> Vec<NotFollowed> {
        let parts = self.format().cloned().into_iter().chain(self.tools().iter().map(arguments));
        let is_xml = self.calls().is_some_and(|calls| calls.format == ToolFormat::QwenXml);
        let in_xml = self.tools().iter().filter(|_| is_xml).flat_map(xml_call_rules::not_followed);
        parts.flat_map(|part| part.not_followed()).chain(in_xml).collect()
    }

    pub(super) fn tools(&self) -> &[CallableTool] {
        self.calls().map_or(&[], |calls| &calls.tools)
    }

    fn format(&self) -> Option<&OutputFormat> {
        match self {
            ReplyForm::Format(format) | ReplyForm::FormatOrCalls(format, _) => Some(format),
            ReplyForm::Calls(_) => None,
        }
    }

    fn calls(&self) -> Option<&ForcedCalls> {
        match self {
            ReplyForm::Calls(calls) | ReplyForm::FormatOrCalls(_, calls) => Some(calls),
            ReplyForm::Format(_) => None,
        }
    }

    /// The grammar of the whole reply: Bursar's Lark rules, which refer to a separate grammar for
    /// each of the caller's forms.
    ///
    /// # Errors
    /// The errors of [`OutputFormat::grammar`], and [`GrammarError::TooLarge`].
    pub(super) fn grammar(&self, thinking: Thinking) -> Result<TopLevelGrammar, ReplyFormError> {
        let mut rules = LarkRules::default();
        let format = self.format().map(|format| rules.part(format)).transpose()?;
        let calls = self.calls().map(|calls| calls_of(&mut rules, calls)).transpose()?;
        let body: Vec<String> = [format, calls].into_iter().flatten().collect();
        Ok(rules.finish(thinking, &body.join(" | ")))
    }
}

/// The form of a tool's arguments as one JSON object.
fn arguments(tool: &CallableTool) -> OutputFormat {
    let mut schema = tool.parameters.clone();
    if let Value::Object(keywords) = &mut schema {
        // Arguments are an object even if the schema does not say so.
        keywords.entry("type").or_insert_with(|| "object".into());
    }
    // Models were trained on JSON with this whitespace: `json.dumps` and the `tojson` filter of
    // chat templates write it.
    OutputFormat::JsonSchema { schema, whitespace: JsonWhitespace::Spaced }
}

/// Adds the rules of calls. Returns the name of the outermost rule.
fn calls_of(rules: &mut LarkRules, calls: &ForcedCalls) -> Result<String, ReplyFormError> {
    ForcedCalls::check_count(calls.tools.len())?;
    let bytes = calls.tools.iter().enumerate().try_fold(0, |sum, (tool, CallableTool { parameters, .. })| {
        schema_bytes(parameters).map(|bytes| sum + bytes).map_err(ReplyFormError::of(tool))
    })?;
    require("list of tools", bytes, "bytes of schemas", TOOLS_BYTES_MAX)?;
    let mut alternatives = Vec::new();
    for (index, tool) in calls.tools.iter().enumerate() {
        alternatives.push(call_of(rules, tool, calls.format).map_err(ReplyFormError::of(index))?);
    }
    if alternatives.is_empty() {
        return Err(GrammarError::NoChoice.into());
    }
    // Llama's templates refuse a turn with several calls.
    let more = match (calls.is_parallel, calls.format) {
        (true, ToolFormat::Hermes | ToolFormat::QwenXml) => format!(" (\"\\n\" call){{0,{}}}", CALLS_MAX - 1),
        _ => String::new(),
    };
    let _ = write!(rules.text, "call: {}\ncalls: call{more}\n", alternatives.join(" | "));
    Ok("calls".to_owned())
}

/// The rule of a call of one tool.
fn call_of(rules: &mut LarkRules, tool: &CallableTool, format: ToolFormat) -> Result<String, GrammarError> {
    require("name of a tool", tool.name.len(), "bytes", NAME_BYTES_MAX)?;
    if format == ToolFormat::QwenXml {
        // The whole schema is checked first, because an error gives a place in the whole schema.
        arguments(tool).grammar()?;
        return XmlCallRules::new(rules, tool).call();
    }
    let Some((before, after)) = format.frame(&tool.name) else { return Err(GrammarError::CallFormat) };
    let arguments = rules.part(&arguments(tool))?;
    Ok(format!("{} {arguments} {}", literal(&before), literal(after)))
}
