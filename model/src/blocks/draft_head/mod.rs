//! Draft heads: small models that read the decoder's rows and predict the tokens after the next one.

mod assistant;
mod eagle3;
mod eagle3_config;
mod mtp;
mod rows;
mod select;

use bursar_kernels::Tensor;

use super::{
    decoder_config::{DecoderConfig, DraftHeadConfig},
    decoder_share::DecoderShare,
};
use crate::weights::{WeightError, WeightMap};

pub use assistant::AssistantHead;
pub use eagle3::{Eagle3Head, LayerInputs};
pub use eagle3_config::read as read_eagle3;
pub use mtp::{MODULE, MtpHead};
pub(super) use rows::DraftColumns;
pub(super) use rows::DraftResults;
pub use rows::{DraftLogits, DraftMemory, DraftRows};
pub use select::{check_fit, select_draft_head};

/// One rank's shard of a draft head.
#[expect(clippy::large_enum_variant, reason = "there is one value per model, so the size does not matter")]
pub enum DraftHead {
    Mtp(MtpHead),
    Eagle3(Eagle3Head),
    Assistant(AssistantHead),
}

impl DraftHead {
    /// Claims the weights of the head that `config` has. The names of the decoder's weights begin with
    /// `prefix`. `loads` yields the counters of expert
    /// choices if the head's layer has experts.
    ///
    /// # Errors
    /// [`WeightError::NoDraftHead`] if the checkpoint has no tensor of the head, and the error of a
    /// tensor that is missing or has the wrong shape.
    pub fn claim(
        config: &DecoderConfig,
        share: &DecoderShare,
        prefix: &str,
        map: &mut WeightMap<'_>,
        loads: &mut impl Iterator<Item = Tensor<'static>>,
    ) -> Result<Option<Self>, WeightError> {
        Ok(match &config.draft_head {
            None => None,
            Some(DraftHeadConfig::Mtp { .. }) => Some(DraftHead::Mtp(MtpHead::claim(config, share, map, loads)?)),
            Some(DraftHeadConfig::Eagle3(head)) => Some(DraftHead::Eagle3(Eagle3Head::claim(config, head, map)?)),
            Some(DraftHeadConfig::Assistant(head)) => {
                Some(DraftHead::Assistant(AssistantHead::claim(config, head, prefix, map)?))
            }
        })
    }
}
