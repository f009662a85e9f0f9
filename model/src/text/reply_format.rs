//! The formats in which a model writes reasoning and tool calls into a reply, as its
//! chat template shows them.

use super::message::Message;

// The tags around a call in the Hermes format.
pub(super) const TOOL_CALL: &str = "<tool_call>";
pub(super) const TOOL_CALL_END: &str = "</tool_call>";
// The tags of a function and its parameters in the XML format. Names follow the opening tags.
pub(super) const FUNCTION: &str = "<function=";
pub(super) const FUNCTION_END: &str = "</function>";
pub(super) const PARAMETER: &str = "<parameter=";
pub(super) const PARAMETER_END: &str = "</parameter>";
/// The tag that Llama 3.1 may write before a call.
const PYTHON_TAG: &str = "<|python_tag|>";
// The tags around a call of Gemma 4, and the quotes around its strings.
const GEMMA_CALL: &str = "<|tool_call>";
pub(super) const GEMMA_CALL_END: &str = "<tool_call|>";
pub(super) const GEMMA_QUOTE: &str = "<|\"|>";

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
    /// `<|tool_call>call:NAME{KEY:VALUE,..}<tool_call|>`, with text and further calls around it as in
    /// Hermes. Strings are delimited by `<|"|>`, without escapes, and keys have no quotes (Google,
    /// Gemma 4 prompt formatting). vLLM names it `gemma4`.
    Gemma4,
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
    /// `<|channel>thought\n..<channel|>` anywhere in the reply (Google, Gemma 4 prompt formatting).
    /// With thinking turned off, the prompt may end with an empty channel.
    ThoughtChannel,
}

/// The tags around reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReasoningTags {
    pub(crate) begin: &'static str,
    pub(crate) end: &'static str,
    /// The token that begins each tag. A tokenizer may treat it as a control token.
    tokens: [&'static str; 2],
    /// Whether the tokens are always special tokens, which no grammar can contain.
    pub(crate) are_special: bool,
}

impl ReasoningTags {
    /// The tags of [`ReasoningFormat::ThinkTags`].
    pub const THINK: Self =
        ReasoningTags { begin: "<think>", end: "</think>", tokens: ["<think>", "</think>"], are_special: false };
    /// The tags of [`ReasoningFormat::ThoughtChannel`].
    pub const CHANNEL: Self = ReasoningTags {
        begin: "<|channel>thought",
        end: "<channel|>",
        tokens: ["<|channel>", "<channel|>"],
        are_special: true,
    };
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
    Possible(ReasoningTags),
    /// The prompt ends with the opening tag: the reply begins in the middle of reasoning.
    Begun(ReasoningTags),
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
        let gemma = has(GEMMA_CALL) && has("call:");
        let tools = match (xml, hermes, llama) {
            _ if gemma => ToolFormat::Gemma4,
            (true, ..) => ToolFormat::QwenXml,
            (_, true, _) => ToolFormat::Hermes,
            (_, _, true) => ToolFormat::Llama3Json,
            _ => ToolFormat::None,
        };
        let formats = [ReasoningFormat::ThoughtChannel, ReasoningFormat::ThinkTags];
        let is_shown = |format: &ReasoningFormat| format.tags().is_some_and(|tags| tags.tokens.into_iter().any(has));
        ReplyFormat { tools, reasoning: formats.into_iter().find(is_shown).unwrap_or_default() }
    }
}

impl ReasoningFormat {
    fn tags(self) -> Option<ReasoningTags> {
        match self {
            ReasoningFormat::None => None,
            ReasoningFormat::ThinkTags => Some(ReasoningTags::THINK),
            ReasoningFormat::ThoughtChannel => Some(ReasoningTags::CHANNEL),
        }
    }

    /// The state of reasoning after a prompt that ends with `end`. If thinking is turned off, the
    /// template closes the reasoning in the prompt.
    pub fn after(self, end: &str) -> Thinking {
        let end = end.trim_end();
        match self.tags() {
            Some(tags) if end.ends_with(tags.begin) => Thinking::Begun(tags),
            Some(tags) if !end.ends_with(tags.end) => Thinking::Possible(tags),
            Some(_) | None => Thinking::Off,
        }
    }

    /// The state of reasoning in a reply that continues the model's `turn`, after a prompt
    /// that ends with `end`.
    pub fn continuing(self, turn: &Message, end: &str) -> Thinking {
        let Some(tags) = self.tags() else { return Thinking::Off };
        let text: String = turn.texts().collect();
        if text.rfind(tags.begin) > text.rfind(tags.end) {
            return Thinking::Begun(tags);
        }
        match (text.is_empty(), turn.reasoning().next()) {
            (false, _) => Thinking::Off,
            (true, Some(_)) => Thinking::Begun(tags),
            (true, None) => self.after(end),
        }
    }
}

impl Thinking {
    /// The tokens that begin or end reasoning. A tokenizer may treat them as control tokens.
    pub fn tokens(self) -> Vec<&'static str> {
        match self {
            Thinking::Off => Vec::new(),
            Thinking::Possible(tags) | Thinking::Begun(tags) => tags.tokens.to_vec(),
        }
    }
}

impl ToolFormat {
    /// The tags around calls and within them. A tokenizer may treat them as control tokens.
    pub fn tags(self) -> &'static [&'static str] {
        match self {
            ToolFormat::None => &[],
            ToolFormat::Hermes | ToolFormat::QwenXml => &[TOOL_CALL, TOOL_CALL_END],
            ToolFormat::Llama3Json => &[PYTHON_TAG],
            ToolFormat::Gemma4 => &[GEMMA_CALL, GEMMA_CALL_END, GEMMA_QUOTE],
        }
    }

    /// The text before and after the arguments of a call, as the models were trained to write
    /// it. `None` for formats whose arguments are not one JSON object.
    pub(crate) fn frame(self, name: &str) -> Option<(String, &'static str)> {
        let name = serde_json::Value::from(name);
        match self {
            ToolFormat::None | ToolFormat::QwenXml | ToolFormat::Gemma4 => None,
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

    /// The tag that ends a call, in formats that have such a tag.
    pub(super) fn closing(self) -> Option<&'static str> {
        self.tags().get(1).copied()
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
        assert_eq!(
            of("'<|tool_call>call:' + function['name'] .. text.split('<channel|>') .. arguments"),
            (ToolFormat::Gemma4, ReasoningFormat::ThoughtChannel)
        );
        assert_eq!(of("<|channel|>analysis"), (ToolFormat::None, ReasoningFormat::None), "this is gpt-oss's format");
    }

    #[test]
    fn the_existing_turn_decides_whether_its_continuation_is_reasoning() {
        let continuing = |content: &[ContentPart], end: &str| {
            let turn = Message { role: Role::Assistant, content: content.to_vec() };
            ReasoningFormat::ThinkTags.continuing(&turn, end)
        };
        let (text, thought) = (|text: &str| ContentPart::Text(text.into()), ContentPart::Reasoning("Hm".into()));
        assert_eq!(continuing(std::slice::from_ref(&thought), "<think>\nHm"), Thinking::Begun(ReasoningTags::THINK));
        assert_eq!(continuing(&[thought, text("So")], "\n</think>\n\nSo"), Thinking::Off);
        assert_eq!(continuing(&[text("So")], "So"), Thinking::Off);
        assert_eq!(
            continuing(&[text("<think>\nHm")], "<think>\nHm"),
            Thinking::Begun(ReasoningTags::THINK),
            "the opening tag is in the text"
        );
        assert_eq!(continuing(&[text("<think>\nHm\n</think>\n\nSo")], "So"), Thinking::Off);
        assert_eq!(
            continuing(&[text("")], "<|im_start|>assistant\n"),
            Thinking::Possible(ReasoningTags::THINK),
            "the reply has no text yet"
        );
        assert_eq!(continuing(&[text("")], "<think>\n\n</think>\n\n"), Thinking::Off);
    }

    #[test]
    fn the_end_of_the_prompt_decides_whether_reasoning_begins() {
        let after = |end: &str| ReasoningFormat::ThinkTags.after(end);
        assert_eq!(after("<|im_start|>assistant\n"), Thinking::Possible(ReasoningTags::THINK));
        assert_eq!(after("<|im_start|>assistant\n<think>\n"), Thinking::Begun(ReasoningTags::THINK));
        assert_eq!(after("<|im_start|>assistant\n<think>\n\n</think>\n\n"), Thinking::Off);
        assert_eq!(ReasoningFormat::None.after("<think>\n"), Thinking::Off);
        let after = |end: &str| ReasoningFormat::ThoughtChannel.after(end);
        assert_eq!(after("<|turn>model\n"), Thinking::Possible(ReasoningTags::CHANNEL));
        assert_eq!(after("<|turn>model\n<|channel>thought\n<channel|>"), Thinking::Off);
    }
}
