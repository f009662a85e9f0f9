//! Tools of a Responses request: their conversion into functions for chat templates, and the
//! conversion of calls back into the client's tools.

use std::collections::HashMap;

use bursar::ToolChoice;
use serde_json::{Value, json};

use crate::{
    error::ApiError,
    models::shortened,
    openai::chat::tool_choice,
    tool::{LeftOut, function},
};

/// Separator between a namespace and a name in the single name that the model sees, as in vLLM.
const JOINT: &str = "__";
/// Name of the only argument of a function that represents a custom tool. The input of a custom
/// tool is plain text.
const INPUT: &str = "input";

/// Tools that the model may call. Tools that only OpenAI's servers run are left out.
#[derive(Default)]
pub(super) struct Tools {
    pub(super) functions: Vec<Value>,
    /// Keyed by the name that the model sees.
    callees: HashMap<String, Callee>,
    left_out: LeftOut,
}

/// The tool of a call, as the client knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Callee {
    pub(super) namespace: Option<String>,
    pub(super) name: String,
    pub(super) is_custom: bool,
    has_grammar: bool,
}

impl Callee {
    fn is_plain(&self) -> bool {
        self.namespace.is_none() && !self.is_custom
    }
}

impl Tools {
    pub(super) fn read(offered: &[Value]) -> Result<Self, ApiError> {
        let mut tools = Tools::default();
        for (index, tool) in offered.iter().enumerate() {
            tools.add(tool, None, &format!("tools[{index}]"))?;
        }
        Ok(tools)
    }

    fn add(&mut self, tool: &Value, namespace: Option<&str>, param: &str) -> Result<(), ApiError> {
        let kind = tool["type"].as_str().ok_or_else(|| missing(param, "type"))?;
        let name = || tool["name"].as_str().filter(|name| !name.is_empty()).ok_or_else(|| missing(param, "name"));
        let field = |field: &str| tool.get(field).filter(|value| !value.is_null()).cloned();
        match kind {
            "function" => {
                let shown = self.shown(namespace, name()?, None, param)?;
                self.functions.push(function(&shown, field("description"), field("parameters")));
            }
            "custom" => {
                let grammar = grammar(tool);
                let shown = self.shown(namespace, name()?, Some(grammar.is_some()), param)?;
                let parts = [tool["description"].as_str().map(str::to_owned), grammar];
                let text: Vec<String> = parts.into_iter().flatten().collect();
                let described = (!text.is_empty()).then(|| text.join("\n\n").into());
                self.functions.push(function(&shown, described, Some(text_parameters())));
            }
            "namespace" if namespace.is_none() => {
                let within = tool["tools"].as_array().ok_or_else(|| missing(param, "tools"))?;
                for (index, tool) in within.iter().enumerate() {
                    self.add(tool, Some(name()?), &format!("{param}.tools[{index}]"))?;
                }
            }
            "local_shell" | "shell" | "apply_patch" | "computer" | "computer_use_preview" => {
                let message = format!("the tool `{kind}` is not supported: only OpenAI's models know it");
                return Err(
                    ApiError::invalid(format!("{param}.type"), message).hint("offer a function that does the same")
                );
            }
            "mcp" => {
                let message = "the tool `mcp` is not supported: this server does not call tools itself";
                let hint = "offer the tools as functions, and call them in the client";
                return Err(ApiError::invalid(format!("{param}.type"), message).hint(hint));
            }
            hosted => self.left_out.add(hosted),
        }
        Ok(())
    }

    /// Registers a tool and returns the name that the model sees. `custom` is `None` for a
    /// function. For a custom tool, `custom` is `Some(true)` if the tool has a grammar.
    fn shown(
        &mut self,
        namespace: Option<&str>,
        name: &str,
        custom: Option<bool>,
        param: &str,
    ) -> Result<String, ApiError> {
        let shown = shown_name(namespace, name);
        let is_plain = namespace.is_none() && custom.is_none();
        // Two functions that have the same name and no namespace are harmless: their calls look the
        // same to the client.
        if self.callees.get(&shown).is_some_and(|there| !is_plain || !there.is_plain()) {
            let message = format!("two tools have the same name for the model, `{}`", shortened(&shown));
            return Err(ApiError::invalid(format!("{param}.name"), message).hint("rename one of them"));
        }
        let (namespace, name) = (namespace.map(str::to_owned), name.to_owned());
        let (is_custom, has_grammar) = (custom.is_some(), custom.unwrap_or_default());
        self.callees.insert(shown.clone(), Callee { namespace, name, is_custom, has_grammar });
        Ok(shown)
    }

    /// Returns the client's tool for a name that the model called. An unknown name is returned as a
    /// function without a namespace.
    pub(super) fn of(&self, name: String) -> Callee {
        let plain = || Callee { namespace: None, name: name.clone(), is_custom: false, has_grammar: false };
        self.callees.get(&name).cloned().unwrap_or_else(plain)
    }

    /// Parses the `tool_choice` of the request.
    pub(super) fn choice(&self, choice: &Value) -> Result<ToolChoice, ApiError> {
        let kind = choice["type"].as_str().unwrap_or("function");
        if !matches!(kind, "function" | "custom") {
            let message = format!("`tool_choice` cannot force a call of `{}`", shortened(kind));
            let hint = "expected `auto`, `none`, `required`, or the name of a function or custom tool";
            return Err(ApiError::invalid("tool_choice", message).hint(hint));
        }
        let chosen = match tool_choice(choice)? {
            ToolChoice::Named(name) => ToolChoice::Named(shown_name(choice["namespace"].as_str(), &name)),
            chosen => chosen,
        };
        self.left_out.check(&chosen, &self.functions)?;
        match &chosen {
            ToolChoice::Named(name) if self.callees.get(name).is_some_and(|callee| callee.has_grammar) => {
                let message = format!(
                    "`tool_choice` cannot force a call of `{}`, because its grammar is not enforced",
                    shortened(name)
                );
                Err(ApiError::invalid("tool_choice", message)
                    .hint("leave `format` out, or set `tool_choice` to `auto`"))
            }
            _ => Ok(chosen),
        }
    }
}

/// Name that the model sees for a function in this namespace.
pub(super) fn shown_name(namespace: Option<&str>, name: &str) -> String {
    namespace.map_or_else(|| name.to_owned(), |namespace| format!("{namespace}{JOINT}{name}"))
}

/// Arguments that represent the input of a custom tool to the model.
pub(super) fn as_arguments(input: &str) -> Value {
    json!({INPUT: input})
}

/// Extracts the input of a custom tool from the arguments that the model has written. If the
/// arguments were cut off, returns the input up to the cut.
pub(super) fn as_input(arguments: &str) -> String {
    let read = |text: &str| {
        let arguments: Value = serde_json::from_str(text).ok()?;
        arguments[INPUT].as_str().map(str::to_owned)
    };
    // A cut may split an escape sequence. The longest, a surrogate pair, has 12 characters.
    let cuts = (0..=12).filter_map(|cut| arguments.get(..arguments.len().checked_sub(cut)?));
    let whole = read(arguments);
    whole.or_else(|| cuts.filter_map(|begun| read(&format!("{begun}\"}}"))).next()).unwrap_or_default()
}

/// JSON Schema for a function that takes one text.
fn text_parameters() -> Value {
    json!({"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT], "additionalProperties": false})
}

/// Description of a custom tool's grammar for the model.
fn grammar(tool: &Value) -> Option<String> {
    let format = tool.get("format").filter(|format| format["type"] == "grammar")?;
    let syntax = format["syntax"].as_str().unwrap_or_default();
    Some(format!("The input follows this {syntax} grammar:\n{}", format["definition"].as_str().unwrap_or_default()))
}

fn missing(param: &str, field: &str) -> ApiError {
    let param = format!("{param}.{field}");
    let message = format!("`{param}` is missing");
    ApiError::invalid(param, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Shape;

    fn read(tools: &Value) -> Result<Tools, Value> {
        Tools::read(tools.as_array().expect("a list")).map_err(|error| error.body(Shape::OpenAi)["error"].clone())
    }

    /// Tools as Codex 0.169 offers them.
    fn of_codex() -> Value {
        let grammar = json!({"type": "grammar", "syntax": "lark", "definition": "start: \"a\""});
        json!([
            {"type": "function", "name": "run", "description": "d", "parameters": {"type": "object"}, "strict": false},
            {"type": "namespace", "name": "agents", "description": "n", "tools": [
                {"type": "function", "name": "wait", "parameters": {"type": "object"}}]},
            {"type": "custom", "name": "patch", "description": "Edits", "format": grammar},
            {"type": "tool_search", "execution": "client"}, {"type": "web_search", "external_web_access": false},
        ])
    }

    #[test]
    fn namespace_and_custom_tools_are_shown_unlike_hosted_tools() {
        let tools = read(&of_codex()).map_err(|_| ()).expect("the request is valid");
        let shown = json!([
            {"type": "function", "function": {"name": "run", "description": "d", "parameters": {"type": "object"}}},
            {"type": "function", "function": {"name": "agents__wait", "parameters": {"type": "object"}}},
            {"type": "function", "function": {
                "name": "patch", "description": "Edits\n\nThe input follows this lark grammar:\nstart: \"a\"",
                "parameters": text_parameters()}},
        ]);
        assert_eq!(Value::from(tools.functions.clone()), shown);
        let wait = tools.of("agents__wait".to_owned());
        assert_eq!((wait.namespace.as_deref(), wait.name.as_str(), wait.is_custom), (Some("agents"), "wait", false));
        assert!(tools.of("patch".to_owned()).is_custom);
        let run = tools.of("run".to_owned());
        assert_eq!((run.namespace, run.name.as_str(), run.is_custom), (None, "run", false));
    }

    #[test]
    fn an_unsupported_tool_is_refused_with_its_path() {
        for (tool, param) in [
            (json!({"name": "f"}), "tools[0].type"),
            (json!({"type": "function"}), "tools[0].name"),
            (json!({"type": "custom", "name": ""}), "tools[0].name"),
            (json!({"type": "namespace", "name": "n"}), "tools[0].tools"),
            (json!({"type": "namespace", "name": "n", "tools": [{"type": "function"}]}), "tools[0].tools[0].name"),
            (json!({"type": "namespace", "tools": [{"type": "function", "name": "f"}]}), "tools[0].name"),
            (json!({"type": "local_shell"}), "tools[0].type"),
            (json!({"type": "mcp", "server_label": "s"}), "tools[0].type"),
        ] {
            let parts = read(&json!([tool])).map(drop).expect_err("this tool is not served");
            assert_eq!(parts["param"], param, "{tool}");
        }
    }

    #[test]
    fn tools_with_the_same_model_visible_name_are_refused() {
        let wait = json!({"type": "function", "name": "wait"});
        let within = json!({"type": "namespace", "name": "agents", "tools": [wait]});
        let joined = json!({"type": "function", "name": "agents__wait"});
        let custom = json!({"type": "custom", "name": "wait"});
        for (tools, param) in [
            (json!([within, joined]), "tools[1].name"),
            (json!([joined, within]), "tools[1].tools[0].name"),
            (json!([within, within]), "tools[1].tools[0].name"),
            (json!([wait, custom]), "tools[1].name"),
        ] {
            assert_eq!(read(&tools).map(drop).expect_err("the tools have the same name")["param"], param, "{tools}");
        }
        assert!(read(&json!([wait, wait, within])).is_ok());
    }

    #[test]
    fn only_tools_visible_to_the_model_can_be_forced() {
        let tools = read(&of_codex()).map_err(|_| ()).expect("the request is valid");
        let choice =
            |choice: &Value| tools.choice(choice).map_err(|error| error.body(Shape::OpenAi)["error"]["param"].clone());
        assert_eq!(choice(&json!("auto")), Ok(ToolChoice::Auto));
        assert_eq!(choice(&json!("required")), Ok(ToolChoice::Required));
        let wait = json!({"type": "function", "name": "wait", "namespace": "agents"});
        assert_eq!(choice(&wait), Ok(ToolChoice::Named("agents__wait".to_owned())));
        let joined = json!({"type": "function", "name": "agents__wait"});
        assert_eq!(choice(&joined), Ok(ToolChoice::Named("agents__wait".to_owned())));
        for refused in [
            json!({"type": "web_search"}),
            json!({"type": "function", "name": "web_search"}),
            json!({"type": "custom", "name": "patch"}),
            json!({"type": "allowed_tools", "mode": "auto", "tools": []}),
            json!("web_search"),
        ] {
            assert_eq!(choice(&refused), Err(json!("tool_choice")), "{refused}");
        }
        let hosted = read(&json!([{"type": "web_search"}])).map_err(|_| ()).expect("hosted tools are left out");
        assert!(hosted.choice(&json!("required")).is_err());
        assert!(hosted.choice(&json!("auto")).is_ok());
    }

    #[test]
    fn the_partial_input_of_a_custom_tool_is_decoded() {
        let text = "*** \"Ä\"\n\u{1f600}";
        let whole = as_arguments(text).to_string();
        assert_eq!(as_input(&whole), text);
        for at in (0..whole.len()).filter(|&at| whole.is_char_boundary(at)) {
            let read = as_input(&whole[..at]);
            assert!(text.starts_with(&read), "{read} of {}", &whole[..at]);
        }
        assert_eq!(as_input(r#"{"input": "ab\ud83d\ude"#), "ab");
        assert_eq!(as_input("no JSON"), "");
    }
}
