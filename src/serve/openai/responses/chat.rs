//! The [`Chat`] that a request for a response asks for.

use std::sync::Arc;

use serde_json::Value;

use super::{items, request::Fields, store::Said};
use crate::{
    Chat, ModelHandle,
    serve::{
        body::Room, draft, effort::with_effort, error::ApiError, form::form, models::shortened,
        openai::chat::tool_choice, service::Shared, tool::function,
    },
};

/// With what was said before, and what is said now.
pub(super) async fn chat(
    fields: &Fields,
    said: &[Arc<Said>],
    model: &ModelHandle,
    shared: &Shared,
    room: &mut Room,
) -> Result<Chat, ApiError> {
    let (now, before) = said.split_last().map_or((None, said), |(now, before)| (Some(now), before));
    let before = before.iter().flat_map(|said| &said.items).map(|item| ("previous_response_id".to_owned(), item));
    let now = now.iter().flat_map(|said| &said.items).enumerate().map(|(at, item)| (format!("input[{at}]"), item));
    let drafts = items::drafts(fields.instructions.as_deref(), before.chain(now))?;
    let mut chat = draft::chat(drafts, model, shared, room).await?;
    let tools = fields.tools.iter().flatten().enumerate().map(|(index, told)| tool(told, index));
    chat = chat.tools(tools.collect::<Result<Vec<_>, _>>()?);
    let choice = fields.tool_choice.as_ref().map(tool_choice).transpose()?;
    chat = choice.into_iter().fold(chat, Chat::tool_choice);
    chat = fields.parallel_tool_calls.into_iter().fold(chat, Chat::parallel_tool_calls);
    chat = fields.max_output_tokens.into_iter().fold(chat, Chat::max_tokens);
    chat = fields.temperature.into_iter().fold(chat, Chat::temperature);
    chat = fields.top_p.into_iter().fold(chat, Chat::top_p);
    chat = with_effort(chat, fields.reasoning.as_ref().and_then(|reasoning| reasoning.effort.clone()));
    let format = fields.text.as_ref().and_then(|text| text.format.as_ref());
    let format = format.map(|format| {
        let kind = format["type"].as_str().unwrap_or_default();
        form(kind, format.get("schema").cloned(), "text.format", "text.format.schema")
    });
    let format = format.transpose()?;
    Ok(format.flatten().into_iter().fold(chat, Chat::format))
}

/// A function as chat templates take it. Other tools would be called by the server, which calls none.
fn tool(tool: &Value, index: usize) -> Result<Value, ApiError> {
    let kind = tool["type"].as_str().unwrap_or_default();
    if kind != "function" {
        let told = format!("the tool `{}` is not served: this server calls no tools itself", shortened(kind));
        return Err(ApiError::invalid(format!("tools[{index}].type"), told).hint("offer functions"));
    }
    let Some(name) = tool["name"].as_str() else {
        let param = format!("tools[{index}].name");
        let told = format!("`{param}` is missing");
        return Err(ApiError::invalid(param, told));
    };
    let field = |field: &str| tool.get(field).filter(|value| !value.is_null()).cloned();
    Ok(function(name, field("description"), field("parameters")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::serve::error::Shape;

    #[test]
    fn a_function_gets_the_form_of_templates_and_other_tools_are_refused_by_name() {
        let flat = json!({"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": true});
        let function = json!({"name": "f", "parameters": {"type": "object"}});
        assert_eq!(tool(&flat, 0).map_err(|_| ()), Ok(json!({"type": "function", "function": function})));
        let told = tool(&json!({"type": "web_search"}), 2).expect_err("it is not served").body(Shape::OpenAi);
        assert_eq!(told["error"]["param"], "tools[2].type");
        assert!(told["error"]["message"].as_str().is_some_and(|text| text.contains("web_search")), "{told}");
    }
}
