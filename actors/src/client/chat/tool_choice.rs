//! The choice of tools that a model may or must call.

use std::sync::Arc;

use bursar_budgets::Hint;
use bursar_model::{
    error::{GrammarError, SchemaPlace},
    sampling::{CallableTool, ForcedCalls, close_objects},
};
use serde_json::{Value, json};
use thiserror::Error;

use super::{Chat, ChatError};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// The model calls no tools. The tools are not shown to the model, and nothing in its reply is
    /// parsed as a call.
    None,
    /// The model calls at least one tool. After its reasoning, if it reasons, the reply consists
    /// only of calls, with arguments that follow the tool's schema. Objects may have only the
    /// properties that their schema names, unless the schema sets `additionalProperties`. Combining
    /// a forced call with [`Chat::format`] is refused.
    Required,
    /// The model calls the tool of this name, once, under the same rules.
    Named(String),
}

/// An invalid set or choice of tools.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum ToolError {
    /// A tool must be called, but the chat has no tools.
    #[error("a tool must be called, but the chat has no tools")]
    NoTools,
    /// The chat has no tool with the name that must be called.
    #[error("the tool that must be called is not one of the chat's {tools} tools")]
    UnknownTool {
        /// Number of tools of the chat.
        tools: usize,
    },
    /// A tool that may be called is not a function with a name and a schema.
    #[error("tool {index} is not a function with a name and parameters")]
    Shape {
        /// The tool's index, from 0.
        index: usize,
    },
    /// A call is forced, but the chat also sets an output format.
    #[error("a tool must be called, so the reply cannot have a format")]
    WithFormat,
    /// The format in which this model writes tool calls is unknown.
    #[error("the format of this model's tool calls is unknown, so a call cannot be forced")]
    NoFormat,
    /// The schema of a tool's parameters cannot be compiled.
    #[error("tool {index}: {source}")]
    Schema {
        /// The tool's index, from 0.
        index: usize,
        source: Arc<GrammarError>,
    },
}

impl ToolError {
    /// More detail for the author of the schema; see [`GrammarError::reason`].
    pub fn reason(&self) -> Option<&str> {
        match self {
            ToolError::Schema { source, .. } => source.reason(),
            _ => None,
        }
    }

    /// See [`GrammarError::place`].
    pub(super) fn place(&self) -> Option<&SchemaPlace> {
        match self {
            ToolError::Schema { source, .. } => source.place(),
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
            ToolError::WithFormat => {
                "leave out the format, or leave the choice to the model: then the reply has the format or is a \
                 call"
                    .to_owned()
            }
            ToolError::NoFormat => "set `reply_format` if you know it, or leave the choice to the model".to_owned(),
            ToolError::Schema { source, .. } => source.hint(),
        }
    }
}

impl Chat {
    /// Returns the names of all tools that have a name.
    pub(super) fn tool_names(&self) -> Arc<[String]> {
        self.tools.iter().filter_map(name).map(str::to_owned).collect()
    }

    /// The tools that a forced call may use, with their indices in the chat.
    ///
    /// # Errors
    /// [`ToolError::NoTools`], [`ToolError::UnknownTool`], [`ToolError::Shape`], or
    /// [`ChatError::Format`] if there are too many tools.
    pub(super) fn callable_tools(&self) -> Result<Vec<(usize, CallableTool)>, ChatError> {
        let wanted = match &self.tool_choice {
            ToolChoice::Named(name) => Some(name.as_str()),
            _ => None,
        };
        let tools: Vec<_> =
            self.tools.iter().enumerate().filter(|(_, tool)| wanted.is_none() || name(tool) == wanted).collect();
        match (self.tools.len(), tools.len()) {
            (0, _) => return Err(ToolError::NoTools.into()),
            (tools, 0) => return Err(ToolError::UnknownTool { tools }.into()),
            (_, callable) => ForcedCalls::check_count(callable)?,
        }
        let callable =
            |(index, tool): (usize, &Value)| callable(tool).map(|tool| (index, tool)).ok_or(ToolError::Shape { index });
        Ok(tools.into_iter().map(callable).collect::<Result<_, _>>()?)
    }
}

/// The function of a tool. OpenAI's outer object with `type` and `function` is optional.
fn function(tool: &Value) -> &Value {
    tool.get("function").unwrap_or(tool)
}

fn name(tool: &Value) -> Option<&str> {
    function(tool)["name"].as_str().filter(|name| !name.is_empty())
}

fn callable(tool: &Value) -> Option<CallableTool> {
    let mut parameters = match &function(tool)["parameters"] {
        // OpenAI: "omitting parameters defines a function with an empty parameter list".
        Value::Null => json!({"type": "object", "properties": {}, "additionalProperties": false}),
        schema @ Value::Object(_) => schema.clone(),
        _ => return None,
    };
    close_objects(&mut parameters);
    Some(CallableTool { name: name(tool)?.to_owned(), parameters })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_many_tools_are_refused_before_any_of_them_is_read() {
        let chat = Chat::new().tools(vec![json!({"no": "function"}); 129]);
        let error = chat.clone().tool_choice(ToolChoice::Required).callable_tools().expect_err("they are too many");
        let ChatError::Format(error) = error else { panic!("{error}") };
        assert!(matches!(*error, GrammarError::TooLarge { value: 129, limit: 128, .. }), "{error}");
        // With too many tools, forcing one tool by name is still allowed.
        let named = chat.tools([json!({"name": "clock"})]).tool_choice(ToolChoice::Named("clock".into()));
        assert_eq!(named.callable_tools().expect("one tool")[0].0, 129);
    }
}
