//! The formats in which a model writes reasoning and tool calls into a reply, as its
//! chat template shows them.

use super::message::Message;

// The tags around reasoning.
pub(super) const THINK: &str = "<think>";
pub(super) const THINK_END: &str = "</think>";
// The tags around a call in the Hermes format.
pub(super) const TOOL_CALL: &str = "<tool_call>";
pub(super) const TOOL_CALL_END: &str = "</tool_call>";
// The tags of a function and its parameters in the XML format. Names follow the opening tags.
pub(super) const FUNCTION: &str = "<function=";
pub(super) const FUNCTION_END: &str = "</function>";
pub(super) const PARAMETER: &str = "<parameter=";
pub(super) const PARAMETER_END: &str = "</parameter>";
/// The tag that Llama 3.1 may write before a call.
pub(super) const PYTHON_TAG: &str = "<|python_tag|>";

/// The format in which a model writes tool calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolFormat {
    /// No known format: the whole reply is text.
    #[default]
    None,
    /// `<tool_call>\n{"name": .., "arguments": {..}}\n</tool_call>`, any number of times, with text
    /// before, between and after the calls (NousResearch, Hermes Function Calling). Qwen2.5 and
    /// Qwen3 write this format.
    Hermes,
    /// `{"name": .., "parameters": {..}}` as the whole reply or after `<|python_tag|>`. Several
    /// calls are separated by semicolons (Llama 3.1's model card).
    Llama3Json,
    /// `<tool_call>\n<function=NAME>\n<parameter=NAME>\nVALUE\n</parameter>\n</function>\n</tool_call>`,
    /// with text and further calls around it as in Hermes. The tool's schema decides whether
    /// `VALUE` is text or JSON. Qwen3-Coder, Qwen3.5 and later write this format; vLLM and SGLang
    /// name it `qwen3_coder`.
    QwenXml,
}

/// The format in which a model writes its reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// No known format: the whole reply is text.
    #[default]
    None,
    /// `<think>..</think>` at the beginning of the reply (DeepSeek-R1, arXiv 2501.12948; Qwen3,
    /// arXiv 2505.09388). The prompt may already contain the opening tag.
    ThinkTags,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplyFormat {
    pub tools: ToolFormat,
    pub reasoning: ReasoningFormat,
}

/// The state of reasoning at the beginning of a reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Thinking {
    /// No reasoning. The reasoning tags are plain text.
    #[default]
    Off,
    /// The reply may open its reasoning itself.
    Possible,
    /// The prompt ends with an open `<think>`: the reply begins in the middle of reasoning.
    Begun,
}

impl ReplyFormat {
    /// The formats that a chat template describes. The template shows the model the format to
    /// write, so it is a better source than the architecture: distilled models keep the
    /// architecture and change the format.
    pub fn of_template(source: &str) -> Self {
        let has = |text: &str| source.contains(text);
        let xml = has(TOOL_CALL) && has(FUNCTION) && has(PARAMETER);
        // Other formats use the same tag as Hermes, but their calls are not JSON, such as GLM's
        // argument keys.
        let hermes = has(TOOL_CALL) && has("arguments") && !has(FUNCTION) && !has("<arg_key>");
        // Llama 3.2's template no longer has the python tag, but tool results still
        // have the role `ipython`.
        let llama = (has(PYTHON_TAG) || has("ipython")) && has("parameters");
        let tools = match (xml, hermes, llama) {
            (true, ..) => ToolFormat::QwenXml,
            (_, true, _) => ToolFormat::Hermes,
            (_, _, true) => ToolFormat::Llama3Json,
            _ => ToolFormat::None,
        };
        let reasoning = if has(THINK) || has(THINK_END) { ReasoningFormat::ThinkTags } else { ReasoningFormat::None };
        ReplyFormat { tools, reasoning }
    }
}

impl ReasoningFormat {
    /// The state of reasoning after a prompt that ends with `end`. If thinking is turned off, the
    /// template closes the reasoning in the prompt.
    pub fn after(self, end: &str) -> Thinking {
        let end = end.trim_end();
        match self {
            ReasoningFormat::ThinkTags if end.ends_with(THINK) => Thinking::Begun,
            ReasoningFormat::ThinkTags if !end.ends_with(THINK_END) => Thinking::Possible,
            ReasoningFormat::ThinkTags | ReasoningFormat::None => Thinking::Off,
        }
    }
}

impl ReasoningFormat {
    /// The state of reasoning in a reply that continues the model's `turn`, after a prompt
    /// that ends with `end`.
    pub fn continuing(self, turn: &Message, end: &str) -> Thinking {
        let text: String = turn.texts().collect();
        let is_open = text.rfind(THINK) > text.rfind(THINK_END);
        match self {
            ReasoningFormat::None => Thinking::Off,
            ReasoningFormat::ThinkTags if is_open => Thinking::Begun,
            ReasoningFormat::ThinkTags if !text.is_empty() => Thinking::Off,
            ReasoningFormat::ThinkTags if turn.reasoning().next().is_some() => Thinking::Begun,
            ReasoningFormat::ThinkTags => self.after(end),
        }
    }
}

impl Thinking {
    /// The tags that begin or end reasoning. A tokenizer may treat them as control tokens.
    pub fn tags(self) -> &'static [&'static str] {
        match self {
            Thinking::Off => &[],
            Thinking::Possible | Thinking::Begun => &[THINK, THINK_END],
        }
    }
}

impl ToolFormat {
    /// The tags around calls. A tokenizer may treat them as control tokens.
    pub fn tags(self) -> &'static [&'static str] {
        match self {
            ToolFormat::None => &[],
            ToolFormat::Hermes | ToolFormat::QwenXml => &[TOOL_CALL, TOOL_CALL_END],
            ToolFormat::Llama3Json => &[PYTHON_TAG],
        }
    }

    /// The text before and after the arguments of a call, as the models were trained to write
    /// it. `None` for formats whose arguments are not one JSON object.
    pub(crate) fn frame(self, name: &str) -> Option<(String, &'static str)> {
        let name = serde_json::Value::from(name);
        match self {
            ToolFormat::None | ToolFormat::QwenXml => None,
            ToolFormat::Hermes => {
                Some((format!("{TOOL_CALL}\n{{\"name\": {name}, \"arguments\": "), "}\n</tool_call>"))
            }
            ToolFormat::Llama3Json => Some((format!("{{\"name\": {name}, \"parameters\": "), "}")),
        }
    }

    /// The first of [`tags`](Self::tags), which begins a call within text.
    pub(super) fn opening(self) -> Option<&'static str> {
        self.tags().first().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::{ContentPart, Role};

    #[test]
    fn reply_formats_are_detected_from_the_template() {
        let of = |source: &str| {
            let ReplyFormat { tools, reasoning } = ReplyFormat::of_template(source);
            (tools, reasoning)
        };
        assert_eq!(of("{{ messages }}"), (ToolFormat::None, ReasoningFormat::None));
        assert_eq!(of("<tool_call>\\n{\"name\": .., \"arguments\": .."), (ToolFormat::Hermes, ReasoningFormat::None));
        assert_eq!(
            of("<tool_call> <function=name> <parameter=name> arguments </think>"),
            (ToolFormat::QwenXml, ReasoningFormat::ThinkTags)
        );
        assert_eq!(of("<tool_call> <function=name> arguments"), (ToolFormat::None, ReasoningFormat::None));
        assert_eq!(of("<tool_call>name <arg_key> arguments"), (ToolFormat::None, ReasoningFormat::None));
        assert_eq!(of("'<|python_tag|>' \"parameters\""), (ToolFormat::Llama3Json, ReasoningFormat::None));
        assert_eq!(of("<|start_header_id|>ipython \"parameters\": "), (ToolFormat::Llama3Json, ReasoningFormat::None));
    }

    #[test]
    fn the_existing_turn_decides_whether_its_continuation_is_reasoning() {
        let continuing = |content: &[ContentPart], end: &str| {
            let turn = Message { role: Role::Assistant, content: content.to_vec() };
            ReasoningFormat::ThinkTags.continuing(&turn, end)
        };
        let (text, thought) = (|text: &str| ContentPart::Text(text.into()), ContentPart::Reasoning("Hm".into()));
        assert_eq!(continuing(std::slice::from_ref(&thought), "<think>\nHm"), Thinking::Begun);
        assert_eq!(continuing(&[thought, text("So")], "\n</think>\n\nSo"), Thinking::Off);
        assert_eq!(continuing(&[text("So")], "So"), Thinking::Off);
        assert_eq!(
            continuing(&[text("<think>\nHm")], "<think>\nHm"),
            Thinking::Begun,
            "the opening tag is in the text"
        );
        assert_eq!(continuing(&[text("<think>\nHm\n</think>\n\nSo")], "So"), Thinking::Off);
        assert_eq!(continuing(&[text("")], "<|im_start|>assistant\n"), Thinking::Possible, "the reply has no text yet");
        assert_eq!(continuing(&[text("")], "<think>\n\n</think>\n\n"), Thinking::Off);
    }

    #[test]
    fn the_end_of_the_prompt_decides_whether_reasoning_begins() {
        let after = |end: &str| ReasoningFormat::ThinkTags.after(end);
        assert_eq!(after("<|im_start|>assistant\n"), Thinking::Possible);
        assert_eq!(after("<|im_start|>assistant\n<think>\n"), Thinking::Begun);
        assert_eq!(after("<|im_start|>assistant\n<think>\n\n</think>\n\n"), Thinking::Off);
        assert_eq!(ReasoningFormat::None.after("<think>\n"), Thinking::Off);
    }
}
