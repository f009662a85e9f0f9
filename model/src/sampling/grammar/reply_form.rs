//! The form of a whole reply: reasoning first, then a form of the caller's or calls of tools.

use std::fmt::Write;

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::{Value, json};

use super::{
    error::{GrammarError, ReplyFormError},
    output_format::{JsonWhitespace, OutputFormat, SCHEMA_BYTES_MAX, require, schema_bytes},
    rewritten_schema::NotFollowed,
};
use crate::text::{Thinking, ToolFormat};

/// Maximum tools to choose among, and bytes of all their schemas.
const TOOLS_MAX: usize = 128;
const TOOLS_BYTES_MAX: usize = 4 * SCHEMA_BYTES_MAX;
/// Maximum bytes of a tool's name. OpenAI's API allows 64.
const NAME_BYTES_MAX: usize = 256;
/// Maximum calls in one reply, because a model that goes on calling never ends.
const CALLS_MAX: usize = 16;

/// A tool that a reply may have to call.
#[derive(Clone, PartialEq)]
pub struct CallableTool {
    /// Its name.
    pub name: String,
    /// A JSON schema of its arguments, an object.
    pub parameters: Value,
}

impl CallableTool {
    /// The form of its arguments.
    fn arguments(&self) -> OutputFormat {
        let mut schema = self.parameters.clone();
        if let Value::Object(keywords) = &mut schema {
            // Calls are objects, also where the schema does not say so.
            keywords.entry("type").or_insert_with(|| "object".into());
        }
        // As `json.dumps` and the templates' `tojson` write it, which is what models have read.
        OutputFormat::JsonSchema { schema, whitespace: JsonWhitespace::Spaced }
    }
}

/// Shows no name and no schema, which are the user's.
impl std::fmt::Debug for CallableTool {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("CallableTool(..)")
    }
}

/// Calls that a reply must consist of.
#[derive(Clone, Debug, PartialEq)]
pub struct ForcedCalls {
    /// How the model writes a call; with [`ToolFormat::None`] nothing can be forced.
    pub format: ToolFormat,
    /// The tools, of which each call takes one.
    pub tools: Vec<CallableTool>,
    /// Whether there may be more than one call: up to 16, in formats that know several.
    pub is_parallel: bool,
}

impl ForcedCalls {
    /// Checks a number of tools, for callers that would have to copy them first.
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
    /// The caller's form.
    Format(OutputFormat),
    /// Calls alone.
    Calls(ForcedCalls),
    /// The caller's form, or calls.
    FormatOrCalls(OutputFormat, ForcedCalls),
}

impl ReplyForm {
    /// The part that can be refused for its own sake: the arguments of the tool of this index, or
    /// without one the caller's form.
    pub(super) fn part(&self, tool: Option<usize>) -> Option<OutputFormat> {
        match tool {
            Some(index) => self.tools().get(index).map(CallableTool::arguments),
            None => self.format().cloned(),
        }
    }

    /// Keywords of its schemas that a reply may not follow.
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

    /// The grammar of the whole reply: rules of ours, and the caller's forms as grammars of
    /// their own beside them.
    ///
    /// # Errors
    /// As the forms', and [`GrammarError::TooLarge`].
    pub(super) fn grammar(&self, thinking: Thinking) -> Result<TopLevelGrammar, ReplyFormError> {
        let mut rules = Rules::default();
        let format = self.format().map(|format| rules.part(format)).transpose()?;
        let calls = self.calls().map(|calls| rules.calls(calls)).transpose()?;
        let body: Vec<String> = [format, calls].into_iter().flatten().collect();
        Ok(rules.finish(thinking, &body.join(" | ")))
    }
}

/// Lark rules as they are collected, and the grammars that they refer to.
#[derive(Default)]
struct Rules {
    text: String,
    parts: Vec<GrammarWithLexer>,
}

impl Rules {
    /// Adds a form as a grammar of its own; returns how rules refer to it.
    fn part(&mut self, form: &OutputFormat) -> Result<String, GrammarError> {
        let grammar = form.grammar()?;
        let name = format!("part{}", self.parts.len());
        let reference = format!("@{name}");
        let part = grammar.grammars.into_iter().next().ok_or(GrammarError::TooComplex)?;
        self.parts.push(GrammarWithLexer { name: Some(name), ..part });
        Ok(reference)
    }

    /// Adds the rules of calls; returns the name of the outermost.
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

    /// A call of one tool, framed by what comes before and after its arguments.
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

/// A text as a string of Lark, whose escapes are JSON's.
fn literal(text: &str) -> String {
    json!(text).to_string()
}
