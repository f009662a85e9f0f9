//! Block tables: the KV cache blocks of a sequence in one cache group.

use bursar_kernels::BLOCK_TOKENS;

/// The KV cache blocks of a sequence in one [cache group](super::CacheGroup).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockTable {
    /// Number of blocks at the beginning of the sequence that are not in the table, because they
    /// are before the group's window.
    pub skipped: usize,
    /// The following blocks, in order.
    pub blocks: Vec<u32>,
}

impl From<Vec<u32>> for BlockTable {
    /// A table that begins with the first block of the sequence.
    fn from(blocks: Vec<u32>) -> Self {
        BlockTable { skipped: 0, blocks }
    }
}

impl BlockTable {
    /// Number of blocks up to the end of the table, including the skipped ones.
    pub fn end(&self) -> usize {
        self.skipped + self.blocks.len()
    }

    /// The cache slot of a token of the sequence.
    ///
    /// # Panics
    /// If the table has no block for the token.
    pub fn slot(&self, token: usize) -> u32 {
        let block = self.blocks[token / BLOCK_TOKENS - self.skipped];
        block * BLOCK_TOKENS as u32 + (token % BLOCK_TOKENS) as u32
    }
}
