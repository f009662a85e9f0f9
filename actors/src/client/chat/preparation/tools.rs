//! The tools of a chat, in the form that the grammar and the parser of the reply need.

use std::sync::Arc;

use bursar_model::{
    sampling::{ForcedCalls, close_objects},
    text::CallableTool,
};
use serde_json::{Value, json};

use crate::chat::{Chat, ChatError, ToolChoice, ToolError};

impl Chat {
    /// Returns all tools that have a name, with their schemas as the model sees them.
    pub(super) fn named_tools(&self) -> Arc<[CallableTool]> {
        let named = |tool| {
            let parameters = function(tool)["parameters"].clone();
            Some(CallableTool { name: name(tool)?.to_owned(), parameters })
        };
        self.tools.iter().filter_map(named).collect()
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

/// Returns the object with the tool's name and parameters. OpenAI's outer object with `type` and
/// `function` is optional.
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
    use bursar_model::error::GrammarError;

    use super::*;

    #[test]
    fn too_many_tools_are_refused_before_parsing() {
        let chat = Chat::new().tools(vec![json!({"no": "function"}); 129]);
        let error =
            chat.clone().tool_choice(ToolChoice::Required).callable_tools().expect_err("there are too many tools");
        let ChatError::Format(error) = error else { panic!("{error}") };
        assert!(matches!(*error, GrammarError::TooLarge { value: 129, limit: 128, .. }), "{error}");
        // With too many tools, forcing one tool by name is still allowed.
        let named = chat.tools([json!({"name": "clock"})]).tool_choice(ToolChoice::Named("clock".into()));
        assert_eq!(named.callable_tools().expect("one tool is callable")[0].0, 129);
    }
}
