//! Which tools a model may or must call.

use std::sync::Arc;

use bursar_budgets::Hint;
use bursar_model::{error::GrammarError, sampling::CallableTool};
use serde_json::{Value, json};
use thiserror::Error;

use super::Chat;

/// Whether the model calls tools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// As the model likes.
    #[default]
    Auto,
    /// No: it is not shown the tools, and nothing in its reply is taken for a call.
    None,
    /// It calls at least one. After its reasoning, if it reasons, the reply is a call and nothing else, with arguments
    /// that follow the tool's schema.
    Required,
    /// It calls the tool of this name, once, in the same way.
    Named(String),
}

/// Tools that a chat cannot have.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum ToolError {
    /// A tool must be called, and there is none.
    #[error("a tool must be called, but the chat has no tools")]
    NoTools,
    /// The tool that must be called is not among the chat's.
    #[error("the tool that must be called is none of the chat's {tools}")]
    UnknownTool {
        /// Number of tools.
        tools: usize,
    },
    /// A tool that a call may be made of is no function with a name and a schema.
    #[error("tool {index} is not a function with a name and parameters")]
    Shape {
        /// The tool's index, from 0.
        index: usize,
    },
    /// The chat template ignores tools.
    #[error("the chat template does not show tools to the model")]
    NotShown,
    /// The model's way to write calls is not known.
    #[error("how this model writes calls is not known, so it cannot be made to write one")]
    NoFormat,
    /// The schema of a tool's parameters cannot be followed.
    #[error("tool {index}: {source}")]
    Schema {
        /// The tool's index, from 0.
        index: usize,
        /// Why.
        source: Arc<GrammarError>,
    },
}

impl ToolError {
    /// More detail for the author of the schema, as [`GrammarError::reason`].
    pub fn reason(&self) -> Option<&str> {
        match self {
            ToolError::Schema { source, .. } => source.reason(),
            _ => None,
        }
    }
}

impl Hint for ToolError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            ToolError::NoTools => "add the tools with `tools`".to_owned(),
            ToolError::UnknownTool { .. } => "name one of the chat's tools".to_owned(),
            ToolError::Shape { .. } => {
                "write it as `{\"type\": \"function\", \"function\": {\"name\": .., \"parameters\": {..}}}`".to_owned()
            }
            ToolError::NotShown => {
                "describe the tools in a system message and set `reply_format`, or use a model with a template for tools"
                    .to_owned()
            }
            ToolError::NoFormat => "set `reply_format` if you know it, or leave the choice to the model".to_owned(),
            ToolError::Schema { source, .. } => source.hint(),
        }
    }
}

impl Chat {
    /// The tools' names, of those that have one.
    pub(super) fn tool_names(&self) -> Arc<[String]> {
        self.tools.iter().filter_map(name).map(str::to_owned).collect()
    }

    /// The tools that a forced call may be made of.
    ///
    /// # Errors
    /// [`ToolError::NoTools`], [`ToolError::UnknownTool`], [`ToolError::Shape`].
    pub(super) fn callable_tools(&self) -> Result<Vec<(usize, CallableTool)>, ToolError> {
        let wanted = match &self.tool_choice {
            ToolChoice::Named(name) => Some(name.as_str()),
            _ => None,
        };
        let tools: Vec<_> =
            self.tools.iter().enumerate().filter(|(_, tool)| wanted.is_none() || name(tool) == wanted).collect();
        match (self.tools.len(), tools.len()) {
            (0, _) => return Err(ToolError::NoTools),
            (tools, 0) => return Err(ToolError::UnknownTool { tools }),
            _ => {}
        }
        let callable =
            |(index, tool): (usize, &Value)| callable(tool).map(|tool| (index, tool)).ok_or(ToolError::Shape { index });
        tools.into_iter().map(callable).collect()
    }
}

/// The function of a tool: within OpenAI's frame, or bare.
fn function(tool: &Value) -> &Value {
    tool.get("function").unwrap_or(tool)
}

fn name(tool: &Value) -> Option<&str> {
    function(tool)["name"].as_str().filter(|name| !name.is_empty())
}

fn callable(tool: &Value) -> Option<CallableTool> {
    let parameters = match &function(tool)["parameters"] {
        // OpenAI: "omitting parameters defines a function with an empty parameter list".
        Value::Null => json!({"type": "object", "properties": {}, "additionalProperties": false}),
        schema @ Value::Object(_) => schema.clone(),
        _ => return None,
    };
    Some(CallableTool { name: name(tool)?.to_owned(), parameters })
}
