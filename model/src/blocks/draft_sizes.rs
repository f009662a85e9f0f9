//! Sizes of the rows that a decoder and its draft head exchange.

use super::decoder_config::{DecoderConfig, DraftHeadConfig};
use crate::flow::{DraftPositions, StepFormat};

impl DecoderConfig {
    /// Number of layers of the draft head with a KV cache; 0 without a draft head and for a Gemma 4 assistant.
    pub fn draft_cache_layers(&self) -> usize {
        match &self.draft_head {
            None | Some(DraftHeadConfig::Assistant(_)) => 0,
            Some(DraftHeadConfig::Mtp { layers, .. }) => *layers,
            Some(DraftHeadConfig::Eagle3(_)) => 1,
        }
    }

    /// Number of elements of a row that the draft head passes to its next draft.
    pub fn draft_width(&self) -> usize {
        match &self.draft_head {
            Some(DraftHeadConfig::Eagle3(head)) => head.layer.hidden,
            Some(DraftHeadConfig::Mtp { .. } | DraftHeadConfig::Assistant(_)) | None => self.hidden,
        }
    }

    /// Number of rows that a step of `tokens` rows leaves for the draft head. A token is chosen for
    /// `logit_rows` of them.
    pub fn draft_rows(&self, tokens: usize, logit_rows: usize) -> usize {
        match &self.draft_head {
            Some(DraftHeadConfig::Assistant(_)) => logit_rows,
            Some(DraftHeadConfig::Mtp { .. } | DraftHeadConfig::Eagle3(_)) | None => tokens,
        }
    }

    /// The positions of drafts after the first.
    pub fn draft_positions(&self) -> DraftPositions {
        match &self.draft_head {
            Some(DraftHeadConfig::Assistant(_)) => DraftPositions::Constant,
            Some(DraftHeadConfig::Mtp { .. } | DraftHeadConfig::Eagle3(_)) | None => DraftPositions::Advancing,
        }
    }

    /// The arrays that a pass of the draft head reads.
    pub fn draft_format(&self) -> StepFormat {
        StepFormat { has_states: false, ..self.step_format() }
    }
}
