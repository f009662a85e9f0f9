//! Names of the checkpoint's tensors: which tensors the model reads, and which tensors it may leave
//! unread.

use std::collections::BTreeSet;

use super::{WeightCopy, WeightError};
use crate::checkpoint::{Checkpoint, Stored, quantization::OUTER};

/// Number of names that an error about extra tensors lists.
const EXTRA_SHOWN: usize = 3;

/// Buffers that older versions of transformers saved with the weights. They are computed from the
/// configuration here, as transformers itself does now.
const BUFFERS: [&str; 2] = [".rotary_emb.inv_freq", ".rotary_pos_emb.inv_freq"];

/// Suffixes of the names of scales of keys and values.
const CACHE_SCALES: [&str; 5] = [".k_scale", ".v_scale", ".k_proj.output_scale", ".v_proj.output_scale", ".kv_scale"];

/// Suffixes of the names of scales of queries and of probabilities, which attention in this project
/// does not quantize.
const ATTENTION_SCALES: [&str; 4] = [".q_scale", ".q_proj.output_scale", ".prob_scale", ".prob_output_scale"];

/// The tensors that claims account for without copying them.
#[derive(Default)]
pub(super) struct TensorNames {
    /// Tensors that need not be read, each with the tensor that is read in its place.
    tied: Vec<(String, String)>,
    /// Tensors that are multiplied into other tensors, with their number of elements.
    folded: Vec<(String, usize)>,
    /// Scales that were read while claiming.
    read: Vec<String>,
    /// The first parts of the names that were claimed outside the decoder.
    outside: BTreeSet<String>,
    /// Names of tensors, and of modules with all their tensors, that this rank leaves unread: other
    /// ranks read them, or the model does not compute with them.
    unread: BTreeSet<String>,
}

impl TensorNames {
    /// Allows `name` to stay unread if it equals `tied_to`, which is read.
    pub fn add_tied(&mut self, name: &str, tied_to: &str) {
        self.tied.push((name.to_owned(), tied_to.to_owned()));
    }

    /// Accounts for a tensor of this many elements that is multiplied into another tensor.
    pub fn fold(&mut self, name: &str, elements: usize) {
        self.folded.push((name.to_owned(), elements));
    }

    /// Accounts for a scale that was read while claiming.
    pub fn mark_read(&mut self, name: String) {
        self.read.push(name);
    }

    /// Remembers a tensor outside the decoder, whose keys and values are not cached.
    pub fn mark_outside_decoder(&mut self, name: &str) {
        self.outside.insert(root(name).to_owned());
    }

    /// Leaves tensors, and modules with all their tensors, unread on this rank.
    pub fn leave_unread(&mut self, names: impl IntoIterator<Item = String>) {
        self.unread.extend(names);
    }

    /// Elements of all tensors that are multiplied into other tensors.
    pub fn folded_elements(&self) -> impl Iterator<Item = usize> {
        self.folded.iter().map(|(_, elements)| *elements)
    }

    /// Compares each pair of tied tensors, if the checkpoint has both tensors.
    ///
    /// # Errors
    /// [`WeightError::Untied`].
    pub fn refuse_untied(&self, checkpoint: &Checkpoint) -> Result<(), WeightError> {
        for (name, tied_to) in self.tied.iter().filter(|(name, _)| checkpoint.tensors.contains(name)) {
            let (one, other) = (checkpoint.tensor(name)?, checkpoint.tensor(tied_to)?);
            if !one.is_same(&other) {
                return Err(WeightError::Untied { name: name.clone(), tied_to: tied_to.clone() });
            }
        }
        Ok(())
    }

    /// Refuses tensors of the checkpoint that are neither copied nor accounted for.
    ///
    /// # Errors
    /// [`WeightError::Extra`], and [`WeightError::AttentionScale`] for scales that attention in
    /// this project does not use.
    pub fn refuse_extra(&self, checkpoint: &Checkpoint, copies: &[WeightCopy]) -> Result<(), WeightError> {
        let copied: BTreeSet<&str> = copies.iter().filter_map(|copy| copy.source.name()).collect();
        let is_cache_quantized = checkpoint.cache().is_quantized();
        let is_extra = |name: &&str| {
            !copied.contains(name)
                && !self.folded.iter().any(|(folded, _)| folded == name)
                && !self.read.iter().any(|read| read == name)
                && !self.is_left_unread(name)
                && !self.is_unread_cache_scale(name, is_cache_quantized)
                && !self.tied.iter().any(|(tied_to, _)| tied_to == name)
                && !is_zero_bias(checkpoint, name)
                && !BUFFERS.iter().any(|buffer| name.ends_with(buffer))
        };
        let extra: Vec<&str> = checkpoint.tensors.names().filter(is_extra).collect();
        if extra.is_empty() {
            return Ok(());
        }
        let is_attention_scale = |name: &&&str| ATTENTION_SCALES.iter().any(|end| name.ends_with(end));
        Err(match extra.iter().find(is_attention_scale) {
            Some(&name) => WeightError::AttentionScale { name: name.to_owned() },
            None => WeightError::Extra {
                count: extra.len(),
                first: extra.iter().take(EXTRA_SHOWN).map(|&name| name.to_owned()).collect(),
            },
        })
    }

    /// Whether this rank leaves the tensor `name` unread.
    fn is_left_unread(&self, name: &str) -> bool {
        self.unread.contains(name) || name.match_indices('.').any(|(module, _)| self.unread.contains(&name[..module]))
    }

    /// Whether a tensor is a scale of keys or values that is not needed, because the cache is not
    /// quantized or because the keys and values belong to a vision tower and are not cached.
    fn is_unread_cache_scale(&self, name: &str, is_cache_quantized: bool) -> bool {
        let is_unread = !is_cache_quantized || self.outside.contains(root(name));
        is_unread && CACHE_SCALES.iter().any(|end| name.ends_with(end))
    }
}

/// Whether a tensor is the bias of a packed weight and all its elements are 0 or -0. AutoGPTQ
/// writes such a bias for each layer that has none.
fn is_zero_bias(checkpoint: &Checkpoint, name: &str) -> bool {
    let Some(module) = name.strip_suffix(".bias") else { return false };
    checkpoint.tensors.is_packed(&format!("{module}.weight"))
        && checkpoint.tensor(name).is_ok_and(|bias| match bias.stored {
            // The sign is the highest bit of an element's last byte in each of these types.
            Stored::Plain(dtype) => bias.bytes.chunks(dtype.bytes()).all(|element| {
                let (last, before) = element.split_last().expect("a chunk is not empty");
                last & 0x7f == 0 && before.iter().all(|byte| *byte == 0)
            }),
            Stored::Blocks(_) | Stored::Packed(_) => false,
        })
}

/// The first part of a name that is not in [`OUTER`], because releases of a model differ in those
/// parts.
fn root(name: &str) -> &str {
    name.split('.').find(|part| !OUTER.contains(part)).unwrap_or(name)
}
