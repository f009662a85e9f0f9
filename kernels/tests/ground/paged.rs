//! Sequences over a paged cache, and the expected result of attention.

use bursar_kernels::{
    ops::{
        attention_paged::PagedSequences,
        rotary::{PairAxes, Rope},
        rotary_kv_write::NO_SLOT,
    },
    *,
};

use super::{
    Random, attend, narrowed,
    pass::starts,
    rounded,
    wide::{Wide, floats, inside, margins},
};

/// Pairs of a row and a token that it sees.
fn pairs_of(rows: usize, context: usize) -> u64 {
    (0..rows).map(|behind| context.saturating_sub(behind) as u64).sum()
}

/// Sequences over a cache that holds NaN except where they wrote.
pub struct PagedData {
    heads: usize,
    shape: KvShape,
    sequences: Vec<(usize, usize)>,
    queries: Vec<f32>,
    keys_values: Vec<f32>, // [tokens of all contexts and two of padding, 2 * kv_heads * head_dim]
    slots: Vec<u32>,
    tables: Vec<u32>,
    table_columns: usize,
    blocks: usize,
}

impl PagedData {
    pub fn new(
        activation: DType,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        sequences: &[(usize, usize)],
        random: &mut Random,
    ) -> Self {
        let shape = KvShape { layers: 1, kv_heads, head_dim, dtype: activation };
        let needed: Vec<usize> = sequences.iter().map(|(_, context)| context.div_ceil(BLOCK_TOKENS)).collect();
        let blocks = needed.iter().sum::<usize>() + 3;
        let table_columns = needed.iter().copied().max().unwrap_or(0) + 1;
        let mut free = random.shuffled(blocks).into_iter();
        let (mut tables, mut slots) = (Vec::new(), Vec::new());
        for ((_, context), needed) in sequences.iter().zip(needed) {
            let table: Vec<u32> = free.by_ref().take(needed).collect();
            slots.extend((0..*context).map(|token| table[token / BLOCK_TOKENS] * 16 + (token % BLOCK_TOKENS) as u32));
            tables.extend(&table);
            tables.extend(vec![u32::MAX; table_columns - needed]);
        }
        slots.extend([NO_SLOT; 2]);
        let rows = sequences.iter().map(|(rows, _)| rows).sum::<usize>();
        PagedData {
            heads,
            shape,
            sequences: sequences.to_vec(),
            queries: Wide::new(activation, rows, heads * head_dim, random).numbers,
            keys_values: rounded(activation, &random.floats(slots.len() * 2 * kv_heads * head_dim))
                .into_iter()
                .map(|number| number as f32)
                .collect(),
            slots,
            tables,
            table_columns,
            blocks,
        }
    }

    pub fn run<B: Backend>(&self, scope: &Scope<'_, B>) -> Result<Vec<f32>, KernelError> {
        let (count, half) = (self.sequences.len(), self.shape.kv_heads * self.shape.head_dim);
        let cache = scope.empty([self.blocks, self.shape.block_bytes().as_usize() / self.shape.dtype.size()])?;
        // SAFETY: the cache lives as long as the layer, and nothing else uses it.
        let layer = unsafe { KvLayer::new(cache.address(), self.blocks, self.shape) };
        let mut keys_values = narrowed(scope, [self.slots.len(), 2 * half], self.shape.dtype, &self.keys_values)?;
        let slots = scope.upload([self.slots.len()], &self.slots)?;
        // Position 0 rotates nothing.
        let positions = scope.upload([1, self.slots.len()], &vec![0u32; self.slots.len()])?;
        let pairs = self.shape.head_dim / 2;
        let rope =
            Rope { frequencies: scope.upload([pairs], &vec![1.0f32; pairs])?, axes: PairAxes::Sections(vec![pairs]) };
        scope.rotary_kv_write(&mut keys_values, 0, None, &positions, &rope, &slots, &layer)?;
        let lengths: Vec<usize> = self.sequences.iter().map(|(rows, _)| *rows).collect();
        let contexts: Vec<u32> = self.sequences.iter().map(|(_, context)| *context as u32).collect();
        let sequences = PagedSequences {
            query_starts: scope.upload([count + 1], &starts(0, &lengths))?,
            context_lengths: scope.upload([count], &contexts)?,
            block_tables: scope.upload([count, self.table_columns], &self.tables)?,
            single_rows: lengths.iter().take_while(|rows| **rows == 1).count(),
            query_key_pairs: self.sequences.iter().map(|(rows, context)| pairs_of(*rows, *context)).sum(),
        };
        let (before, behind) = margins(self.shape.dtype);
        let pitch = before + self.heads * self.shape.head_dim + behind;
        let queries = narrowed(scope, [self.queries.len() / pitch, pitch], self.shape.dtype, &self.queries)?;
        let scale = (self.shape.head_dim as f32).powf(-0.5);
        floats(scope, &scope.attention_paged(&inside(&queries), &layer, &sequences, scale)?)
    }

    pub fn expected(&self) -> Vec<f64> {
        let (kv_heads, head_dim) = (self.shape.kv_heads, self.shape.head_dim);
        let columns = self.heads * head_dim;
        let (before, behind) = margins(self.shape.dtype);
        let (mut out, mut row, mut token) = (Vec::new(), 0, 0);
        for (rows, context) in &self.sequences {
            if *context == 0 {
                out.extend(vec![0.0; rows * columns]);
                row += rows;
                continue;
            }
            for index in 0..*rows {
                for head in 0..self.heads {
                    let kv_head = head / (self.heads / kv_heads);
                    let seen = token..token + context - rows + index + 1;
                    let vector = |token: usize, half: usize| {
                        &self.keys_values[((token * 2 + half) * kv_heads + kv_head) * head_dim..][..head_dim]
                    };
                    let [keys, values] =
                        [0, 1].map(|half| seen.clone().map(|token| vector(token, half)).collect::<Vec<_>>());
                    let query =
                        &self.queries[row * (before + columns + behind) + before + head * head_dim..][..head_dim];
                    out.extend(attend(query, &keys, &values));
                }
                row += 1;
            }
            token += context;
        }
        out
    }
}
