//! A checkpoint's fingerprint: equal for checkpoints with equal settings,
//! vocabulary and tensor layout.

use super::shard::Shard;

/// BLAKE3 hash of the settings, the vocabulary, and each shard's name, size and header. The values
/// of the weights are not included: reading them would take as long as loading, and a fine-tuned
/// model has the same memory profile.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct CheckpointFingerprint(pub [u8; 32]);

impl CheckpointFingerprint {
    /// Hashes named texts and the shards. The length of each piece is hashed too, so that bytes
    /// cannot move from one piece to the next without changing the fingerprint.
    pub(super) fn new<'t>(texts: impl IntoIterator<Item = (&'t str, Option<&'t [u8]>)>, shards: &[Shard]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("bursar 2026 checkpoint fingerprint v1");
        let mut add = |piece: &[u8]| {
            hasher.update(&(piece.len() as u64).to_le_bytes());
            hasher.update(piece);
        };
        for (name, content) in texts {
            add(name.as_bytes());
            add(&[u8::from(content.is_some())]);
            add(content.unwrap_or_default());
        }
        for shard in shards {
            add(shard.file().as_bytes());
            add(&shard.file_bytes().to_le_bytes());
            add(shard.header());
        }
        CheckpointFingerprint(*hasher.finalize().as_bytes())
    }
}

/// Formats the fingerprint as 64 hexadecimal digits.
impl std::fmt::Display for CheckpointFingerprint {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

impl std::fmt::Debug for CheckpointFingerprint {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "CheckpointFingerprint({self})")
    }
}
