//! A checkpoint that nobody has trained: settings and vocabulary as a real one has them, weights drawn at random where
//! they are computed with. It has the speed and the memory of its shape, and nothing to say.

use std::{borrow::Cow, collections::BTreeMap, fmt};

use super::checkpoint_files::CheckpointSource;
use super::error::CheckpointError;

/// How far weights lie from zero: `initializer_range` of the checkpoints that it stands for. With it activations stay
/// numbers through any depth, as norms stand between the layers.
pub const DEVIATION: f32 = 0.02;

/// Settings and vocabulary in memory, and a seed for the weights. No tensor exists before its place on the device does:
/// there is no file of all weights and no copy of them on the host.
#[derive(Clone)]
pub struct RandomCheckpoint {
    name: String,
    seed: u64,
    /// Where a file is looked for first.
    folder: Option<CheckpointSource>,
    files: BTreeMap<&'static str, Vec<u8>>,
}

/// What a tensor of a random checkpoint holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RandomTensor {
    /// Numbers around zero with the standard deviation [`DEVIATION`], from this seed.
    Drawn {
        /// Of this tensor alone.
        seed: u64,
    },
    /// Nothing but ones: what a norm multiplies with.
    Ones,
}

impl RandomCheckpoint {
    /// A checkpoint of these `files`, by name as a folder would have them, without weights. Equal seeds give equal
    /// weights.
    pub fn new(name: impl Into<String>, seed: u64, files: impl IntoIterator<Item = (&'static str, Vec<u8>)>) -> Self {
        RandomCheckpoint { name: name.into(), seed, folder: None, files: files.into_iter().collect() }
    }

    /// The checkpoint of `folder` as far as its files are there, with these `files` in place of others, and without its
    /// weights.
    pub fn over(folder: CheckpointSource, files: impl IntoIterator<Item = (&'static str, Vec<u8>)>) -> Self {
        let name = folder.place();
        RandomCheckpoint { folder: Some(folder), ..RandomCheckpoint::new(name, 0, files) }
    }

    /// The name of its shape.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the weights are drawn from.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// For messages.
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

    /// What the tensor of this name holds, of so many axes. A vector that is called a weight scales what a norm has
    /// made; all else is drawn.
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
