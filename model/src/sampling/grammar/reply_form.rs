//! The form of a whole reply: reasoning first, then the caller's form or tool calls.

use std::fmt::Write;

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::{Value, json};

use super::{
    error::{GrammarError, ReplyFormError},
    output_format::{JsonWhitespace, OutputFormat, SCHEMA_BYTES_MAX, require, schema_bytes},
    rewritten_schema::NotFollowed,
};
use crate::text::{Thinking, ToolFormat};

// Maximum number of tools to choose among, and maximum bytes of all their schemas.
const TOOLS_MAX: usize = 128;
const TOOLS_BYTES_MAX: usize = 4 * SCHEMA_BYTES_MAX;
/// Maximum bytes of a tool's name. OpenAI's API allows 64.
const NAME_BYTES_MAX: usize = 256;
/// Maximum calls in one reply, because a model might never stop calling tools.
const CALLS_MAX: usize = 16;

/// A tool that a reply may have to call.
#[derive(Clone, PartialEq)]
pub struct CallableTool {
    pub name: String,
    /// A JSON schema of the arguments, which are one JSON object.
    pub parameters: Value,
}

impl CallableTool {
    /// The form of the arguments.
    fn arguments(&self) -> OutputFormat {
        let mut schema = self.parameters.clone();
        if let Value::Object(keywords) = &mut schema {
            // Arguments are an object even if the schema does not say so.
            keywords.entry("type").or_insert_with(|| "object".into());
        }
        // Models were trained on JSON with this whitespace: `json.dumps` and the `tojson` filter of
        // chat templates write it.
        OutputFormat::JsonSchema { schema, whitespace: JsonWhitespace::Spaced }
    }
}

/// Omits name and schema, which are the user's data.
impl std::fmt::Debug for CallableTool {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("CallableTool(..)")
    }
}

/// Calls that a reply must consist of.
#[derive(Clone, Debug, PartialEq)]
pub struct ForcedCalls {
    /// The format in which the model writes a call. With [`ToolFormat::None`], no
    /// call can be forced.
    pub format: ToolFormat,
    /// The tools that a call may choose from.
    pub tools: Vec<CallableTool>,
    /// Whether a reply may have more than one call: up to 16, in formats
    /// that support several calls.
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
            Some(index) => self.tools().get(index).map(CallableTool::arguments),
            None => self.format().cloned(),
        }
    }

    /// Keywords of all schemas that a reply may violate, because no grammar can enforce them.
    pub fn not_followed(&self) -> Vec<NotFollowed> {
        let tools = self.tools().iter().map(CallableTool::arguments);
        self.format().cloned().into_iter().chain(tools).flat_map(|part| part.not_followed()).collect()
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
        let mut rules = Rules::default();
        let format = self.format().map(|format| rules.part(format)).transpose()?;
        let calls = self.calls().map(|calls| rules.calls(calls)).transpose()?;
        let body: Vec<String> = [format, calls].into_iter().flatten().collect();
        Ok(rules.finish(thinking, &body.join(" | ")))
    }
}

/// The Lark rules collected so far, and the grammars that they refer to.
#[derive(Default)]
struct Rules {
    text: String,
    parts: Vec<GrammarWithLexer>,
}

impl Rules {
    /// Adds a form as a separate grammar. Returns the reference to use in rules.
    fn part(&mut self, form: &OutputFormat) -> Result<String, GrammarError> {
        let grammar = form.grammar()?;
        let name = format!("part{}", self.parts.len());
        let reference = format!("@{name}");
        let part = grammar.grammars.into_iter().next().ok_or(GrammarError::TooComplex)?;
        self.parts.push(GrammarWithLexer { name: Some(name), ..part });
        Ok(reference)
    }

    /// Adds the rules of calls. Returns the name of the outermost rule.
    fn calls(&mut self, calls: &ForcedCalls) -> Result<String, ReplyFormError> {
        ForcedCalls::check_count(calls.tools.len())?;
        let bytes = calls.tools.iter().enumerate().try_fold(0, |sum, (tool, CallableTool { parameters, .. })| {
            schema_bytes(parameters).map(|bytes| sum + bytes).map_err(ReplyFormError::of(tool))
        })?;
        require("list of tools", bytes, "bytes of schemas", TOOLS_BYTES_MAX)?;
        let alternatives = calls.tools.iter().enumerate().filter_map(|(index, tool)| {
            let frame = calls.format.frame(&tool.name)?;
            Some(self.call(tool, frame).map_err(ReplyFormError::of(index)))
        });
        let alternatives: Vec<String> = alternatives.collect::<Result<_, _>>()?;
        if alternatives.is_empty() {
            return Err(GrammarError::NoChoice.into());
        }
        // Llama's templates refuse a turn with several calls.
        let more = match (calls.is_parallel, calls.format) {
            (true, ToolFormat::Hermes) => format!(" (\"\\n\" call){{0,{}}}", CALLS_MAX - 1),
            _ => String::new(),
        };
        let _ = write!(self.text, "call: {}\ncalls: call{more}\n", alternatives.join(" | "));
        Ok("calls".to_owned())
    }

    /// A call of one tool: the text before its arguments, the arguments, and the text after them.
    fn call(&mut self, tool: &CallableTool, (before, after): (String, &str)) -> Result<String, GrammarError> {
        require("name of a tool", tool.name.len(), "bytes", NAME_BYTES_MAX)?;
        let arguments = self.part(&tool.arguments())?;
        Ok(format!("{} {arguments} {}", literal(&before), literal(after)))
    }

    fn finish(mut self, thinking: Thinking, body: &str) -> TopLevelGrammar {
        let thoughts = match thinking {
            Thinking::Off => "",
            Thinking::Possible => "(\"<think>\" thoughts)? ",
            Thinking::Begun => "thoughts ",
        };
        if thinking != Thinking::Off {
            self.text += "thoughts: thought (\"\\n\" | \"\\n\\n\")?\nthought[suffix=\"</think>\"]: /(?s:.*)/\n";
        }
        let rules = format!("start: {thoughts}({body})\n{}", self.text);
        let mut grammars = vec![GrammarWithLexer::from_lark(rules)];
        grammars.append(&mut self.parts);
        TopLevelGrammar { grammars, max_tokens: None }
    }
}

/// A text as a Lark string. Lark uses JSON's escapes.
fn literal(text: &str) -> String {
    json!(text).to_string()
}
