//! An untrained checkpoint: the settings and the vocabulary size of a real checkpoint, and
//! weights drawn at random on the device. It has the speed and the memory of its shape, but
//! its replies mean nothing.

use std::{borrow::Cow, collections::BTreeMap, fmt};

use super::checkpoint_files::CheckpointSource;
use super::error::CheckpointError;

/// Standard deviation of the weights: `initializer_range` of the released checkpoints. With norms
/// between the layers, activations stay finite at any depth.
pub const DEVIATION: f32 = 0.02;

/// Settings and vocabulary in memory, and a seed for the weights. Tensors are drawn directly on the
/// device, so the host never has a copy or a file of them.
#[derive(Clone)]
pub struct RandomCheckpoint {
    name: String,
    seed: u64,
    routing_skew: Option<f32>,
    /// A checkpoint whose files take precedence over `files`.
    folder: Option<CheckpointSource>,
    files: BTreeMap<&'static str, Vec<u8>>,
}

/// The content of a tensor of a random checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RandomTensor {
    /// Roughly normally distributed numbers with mean 0 and standard deviation [`DEVIATION`].
    Drawn {
        /// The seed of this tensor.
        seed: u64,
    },
    /// Ones, for the weights of norms.
    Ones,
}

impl RandomCheckpoint {
    /// A checkpoint of `files`, keyed by file name, without stored weights. Equal
    /// seeds give equal weights.
    pub fn new(name: impl Into<String>, seed: u64, files: impl IntoIterator<Item = (&'static str, Vec<u8>)>) -> Self {
        let files = files.into_iter().collect();
        RandomCheckpoint { name: name.into(), seed, routing_skew: None, folder: None, files }
    }

    /// The checkpoint of `folder` without its weights. `files` replace the files
    /// that the folder lacks.
    pub fn over(folder: CheckpointSource, files: impl IntoIterator<Item = (&'static str, Vec<u8>)>) -> Self {
        let name = folder.place();
        RandomCheckpoint { folder: Some(folder), ..RandomCheckpoint::new(name, 0, files) }
    }

    /// The name of the model's shape.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The seed of all weights.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The same checkpoint, with routers that prefer some experts, as the routers of trained
    /// mixtures do for text. By Zipf's law, the expert of rank `r` is chosen in proportion to
    /// `r^-exponent`, but by at most 45 % of all rows. Without a skew, experts are chosen evenly,
    /// which reads the most weights.
    pub fn with_routing_skew(self, exponent: f32) -> Self {
        RandomCheckpoint { routing_skew: Some(exponent), ..self }
    }

    /// The exponent of Zipf's law by which experts are chosen; `None` if experts are chosen evenly.
    pub fn routing_skew(&self) -> Option<f32> {
        self.routing_skew
    }

    /// The folder, or the shape's name, for messages.
    pub(super) fn place(&self) -> String {
        match &self.folder {
            Some(folder) => folder.place(),
            None => format!("({}, random)", self.name),
        }
    }

    pub(super) fn read(&self, file: &str) -> Result<Option<Cow<'static, [u8]>>, CheckpointError> {
        let found = self.folder.as_ref().map_or(Ok(None), |folder| folder.read(file))?;
        Ok(found.or_else(|| self.files.get(file).map(|content| Cow::Owned(content.clone()))))
    }

    /// The content of the tensor `name` with `axes` axes. A vector whose name ends in `.weight`
    /// belongs to a norm and holds ones; all other tensors are drawn.
    pub(super) fn tensor(seed: u64, name: &str, axes: usize) -> RandomTensor {
        if axes <= 1 && name.ends_with(".weight") {
            return RandomTensor::Ones;
        }
        let mut hasher = blake3::Hasher::new_derive_key("bursar 2026 random tensor v1");
        hasher.update(&seed.to_le_bytes()).update(name.as_bytes());
        let [a, b, c, d, e, f, g, h, ..] = *hasher.finalize().as_bytes();
        RandomTensor::Drawn { seed: u64::from_le_bytes([a, b, c, d, e, f, g, h]) }
    }
}

impl fmt::Debug for RandomCheckpoint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "RandomCheckpoint({}, seed {})", self.name, self.seed)
    }
}
