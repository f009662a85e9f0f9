//! Tool calls in formats that are not JSON, and whose arguments are converted to JSON.

use std::sync::Arc;

use super::{callable_tool::CallableTool, gemma_call::GemmaCall, reply_format::ToolFormat, xml_call::XmlCall};

/// A reader of one call, after its name.
#[derive(Clone)]
pub(super) enum ConvertedCall {
    Xml(XmlCall),
    Gemma(GemmaCall),
}

impl ConvertedCall {
    /// A reader of a call of the tool `name`.
    pub(super) fn new(format: ToolFormat, tools: Arc<[CallableTool]>, name: &str) -> Self {
        match format {
            ToolFormat::Gemma4 => ConvertedCall::Gemma(GemmaCall::new(tools, name)),
            _ => ConvertedCall::Xml(XmlCall::new(tools, name)),
        }
    }

    /// Reads a character. At the end of the call, returns whether the call is complete.
    pub(super) fn feed(&mut self, next: char) -> Option<bool> {
        match self {
            ConvertedCall::Xml(call) => call.feed(next),
            ConvertedCall::Gemma(call) => call.feed(next),
        }
    }

    /// Ends a call that the end of the reply has cut off.
    pub(super) fn finish(&mut self) {
        match self {
            ConvertedCall::Xml(call) => call.finish(),
            ConvertedCall::Gemma(call) => call.finish(),
        }
    }

    /// The JSON text read since the caller last cleared it, and the text that it was read from.
    pub(super) fn text(&mut self) -> (&mut String, &mut String) {
        match self {
            ConvertedCall::Xml(call) => (&mut call.json, &mut call.written),
            ConvertedCall::Gemma(call) => (&mut call.json, &mut call.written),
        }
    }

    /// The text after the end of the call that the reader has already read.
    pub(super) fn into_held(self) -> String {
        match self {
            ConvertedCall::Xml(call) => call.held,
            ConvertedCall::Gemma(call) => call.held,
        }
    }
}
