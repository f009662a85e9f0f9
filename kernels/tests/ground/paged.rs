//! Sequences over a paged cache, and the expected result of attention.

use bursar_kernels::{
    ops::{
        attention_paged::{AttentionMask, PagedSequences},
        rotary::{PairAxes, Rope},
        rotary_kv_write::NO_SLOT,
    },
    *,
};

use super::{
    Random, attend, cache_scales, narrowed,
    pass::{Pass, starts},
    rounded,
    wide::{Wide, floats, inside, margins},
};

/// Number of query-key pairs of a sequence without a window.
fn pairs_of(rows: usize, context: usize) -> u64 {
    (0..rows).map(|behind| context.saturating_sub(behind) as u64).sum()
}

/// The first token that a row attends to, if the row's last token is `end - 1`.
fn first_seen(end: usize, window: Option<usize>) -> usize {
    window.map_or(0, |window| end.saturating_sub(window))
}

/// Attention with sliding windows or pictures. The caller repeats the passes with windows with an
/// E4M3 cache.
pub fn masked() -> Vec<Pass> {
    let mut passes = Vec::new();
    let mut add = |heads, kv_heads, head_dim, window, sequences: &[(usize, usize)]| {
        let sequences = sequences.to_vec();
        passes.push(Pass::Paged { heads, kv_heads, head_dim, sequences, window: Some(window) });
    };
    // Windows that end within a block, at its ends and beyond each context: prompts in one chunk
    // and in several chunks, decoding, and a window that begins in a later tile of keys.
    for window in [1, 15, 16, 17, 64, 127, 128, 5000] {
        let sequences = [(1, 1), (1, 333), (1, 0), (37, 37), (141, 141), (18, 150), (0, 40), (1, 16), (3, 129)];
        add(4, 2, 32, window, &sequences);
        add(7, 1, 80, window, &[(1, 700), (1, 30), (61, 400)]);
    }
    // Windows with head sizes that have separate kernels on a GPU. Rows of the last sequence attend
    // to keys of several tiles.
    for (heads, head_dim, window) in
        [(7, 128, 17), (2, 256, 33), (3, 64, 100), (1, 128, 130), (2, 256, 200), (3, 512, 90)]
    {
        add(heads, 1, head_dim, window, &[(1, 300), (1, 16), (1, 0), (40, 40), (0, 30), (3, 150), (131, 390)]);
    }
    // A few rows with a long window over a longer context, which a GPU splits.
    for head_dim in [128, 256, 512] {
        add(4, 1, head_dim, 1100, &[(1, 30), (5, 1500), (0, 5)]);
    }
    // Only decoding, with windows that are cut into pieces.
    add(2, 1, 64, 600, &[(1, 5000), (1, 601), (1, 616), (1, 617), (1, 599), (1, 3)]);
    passes.extend(PagedPictures::passes());
    passes
}

/// Attention in which the tokens of a picture of `picture` tokens attend to one another.
#[derive(Clone, Debug)]
pub struct PagedPictures {
    /// Query heads, key and value heads, elements of a head.
    pub sizes: [usize; 3],
    /// New rows and context length.
    pub sequences: Vec<(usize, usize)>,
    pub window: Option<usize>,
    pub picture: usize,
    pub is_fp8: bool,
}

impl PagedPictures {
    /// Pictures that start or end inside a tile, at its edge, or span several tiles, with and
    /// without windows shorter than a picture.
    pub fn passes() -> Vec<Pass> {
        let mut passes = Vec::new();
        let mut add = |sizes, is_fp8, sequences: &[(usize, usize)], window, picture| {
            let sequences = sequences.to_vec();
            passes.push(Pass::PagedPictures(PagedPictures { sizes, sequences, window, picture, is_fp8 }));
        };
        let kinds = [([4, 2, 32], false), ([7, 1, 80], false), ([2, 1, 128], false), ([4, 2, 256], false)];
        for (sizes, is_fp8) in kinds.into_iter().chain([([2, 1, 64], true), ([2, 1, 128], true)]) {
            let sequences = [(1, 30), (0, 17), (40, 40), (270, 293), (3, 150), (1, 9)];
            for (picture, window) in
                [(7, None), (61, None), (256, None), (9, Some(1)), (61, Some(24)), (256, Some(100))]
            {
                add(sizes, is_fp8, &sequences, window, picture);
            }
        }
        // Few rows over a long context, which a GPU splits.
        for (head_dim, is_fp8) in [(128, false), (256, false), (128, true)] {
            for window in [None, Some(1100)] {
                add([4, 1, head_dim], is_fp8, &[(1, 30), (5, 1500), (0, 5)], window, 9);
            }
        }
        passes
    }

    pub fn data(&self, activation: DType, random: &mut Random) -> PagedData {
        PagedData::new(activation, self.is_fp8, self.sizes, &self.sequences, self.window, random)
            .with_pictures(self.picture)
    }
}

/// Sequences over a cache that contains NaN except where the sequences have written.
pub struct PagedData {
    heads: usize,
    shape: KvShape,
    activation: DType,
    scales: Option<Vec<f32>>, // [2, kv_heads]
    sequences: Vec<(usize, usize)>,
    window: Option<usize>,
    key_ends: Option<Vec<u32>>, // [rows]
    queries: Vec<f32>,
    keys_values: Vec<f32>, // [tokens of all contexts and two of padding, 2 * kv_heads * head_dim]
    slots: Vec<u32>,
    tables: Vec<u32>,
    table_columns: usize,
    blocks: usize,
}

impl PagedData {
    /// Creates the sequences, with a cache in E4M3 if `is_fp8`. Blocks before the window are not
    /// written, and their entries in the block tables are not valid block indices.
    pub fn new(
        activation: DType,
        is_fp8: bool,
        [heads, kv_heads, head_dim]: [usize; 3],
        sequences: &[(usize, usize)],
        window: Option<usize>,
        random: &mut Random,
    ) -> Self {
        let dtype = if is_fp8 { DType::F8E4M3 } else { activation };
        let shape = KvShape { layers: 1, kv_heads, head_dim, dtype };
        let needed: Vec<usize> = sequences.iter().map(|(_, context)| context.div_ceil(BLOCK_TOKENS)).collect();
        let blocks = needed.iter().sum::<usize>() + 3;
        let table_columns = needed.iter().copied().max().unwrap_or(0) + 1;
        let mut free = random.shuffled(blocks).into_iter();
        let (mut tables, mut slots) = (Vec::new(), Vec::new());
        for ((rows, context), needed) in sequences.iter().zip(needed) {
            let table: Vec<u32> = free.by_ref().take(needed).collect();
            let hidden = first_seen(context.saturating_sub(*rows) + 1, window) / BLOCK_TOKENS;
            slots.extend((0..*context).map(|token| match token / BLOCK_TOKENS {
                block if block < hidden => NO_SLOT,
                block => table[block] * 16 + (token % BLOCK_TOKENS) as u32,
            }));
            tables.extend(table.iter().enumerate().map(|(at, block)| if at < hidden { u32::MAX } else { *block }));
            tables.extend(vec![u32::MAX; table_columns - needed]);
        }
        slots.extend([NO_SLOT; 2]);
        let rows = sequences.iter().map(|(rows, _)| rows).sum::<usize>();
        PagedData {
            heads,
            shape,
            activation,
            scales: is_fp8.then(|| cache_scales(kv_heads, random)),
            sequences: sequences.to_vec(),
            window,
            key_ends: None,
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

    /// The same sequences with pictures of `picture` tokens, the last one maybe shorter. Each
    /// sequence begins with a picture, and three tokens of text follow each picture.
    pub fn with_pictures(self, picture: usize) -> Self {
        let of_sequence = |(rows, context): &(usize, usize)| {
            let (rows, cached) = (*rows, context.saturating_sub(*rows));
            let end = move |row: usize| match row % (picture + 3) {
                at if at < picture => (row - at + picture).min(rows),
                _ => row + 1,
            };
            (0..rows).map(move |row| (cached + end(row)) as u32)
        };
        let key_ends = Some(self.sequences.iter().flat_map(of_sequence).collect());
        PagedData { key_ends, ..self }
    }

    pub fn run<B: Backend>(&self, scope: &Scope<'_, B>) -> Result<Vec<f32>, KernelError> {
        let (count, half) = (self.sequences.len(), self.shape.kv_heads * self.shape.head_dim);
        let words = self.shape.block_bytes().as_usize() / DType::F32.size();
        let cache = scope.empty_f32([self.blocks, words])?;
        // SAFETY: the cache lives as long as the layer, and nothing else uses it.
        let layer = unsafe { KvLayer::new(cache.address(), self.blocks, self.shape) };
        let scales = match &self.scales {
            Some(scales) => Some(scope.upload([2, self.shape.kv_heads], scales)?),
            None => None,
        };
        let cached = layer.scaled(scales.as_ref());
        let mut keys_values = narrowed(scope, [self.slots.len(), 2 * half], self.activation, &self.keys_values)?;
        let slots = scope.upload([self.slots.len()], &self.slots)?;
        // Position 0 rotates nothing.
        let positions = scope.upload([1, self.slots.len()], &vec![0u32; self.slots.len()])?;
        let pairs = self.shape.head_dim / 2;
        let rope =
            Rope { frequencies: scope.upload([pairs], &vec![1.0f32; pairs])?, axes: PairAxes::Sections(vec![pairs]) };
        scope.rotary_kv_write(&mut keys_values, 0, None, &positions, &rope, &slots, cached)?;
        let lengths: Vec<usize> = self.sequences.iter().map(|(rows, _)| *rows).collect();
        let contexts: Vec<u32> = self.sequences.iter().map(|(_, context)| *context as u32).collect();
        let sequences = PagedSequences {
            has_linked_rows: false,
            query_starts: scope.upload([count + 1], &starts(0, &lengths))?,
            context_lengths: scope.upload([count], &contexts)?,
            block_tables: scope.upload([count, self.table_columns], &self.tables)?,
            single_rows: lengths.iter().take_while(|rows| **rows == 1).count(),
            query_key_pairs: self.sequences.iter().map(|(rows, context)| pairs_of(*rows, *context)).sum(),
        };
        let (before, behind) = margins(self.activation);
        let pitch = before + self.heads * self.shape.head_dim + behind;
        let queries = narrowed(scope, [self.queries.len() / pitch, pitch], self.activation, &self.queries)?;
        let scale = (self.shape.head_dim as f32).powf(-0.5);
        let key_ends = match &self.key_ends {
            Some(key_ends) => Some(scope.upload([key_ends.len()], key_ends)?),
            None => None,
        };
        let mask = AttentionMask { window: self.window, key_ends: key_ends.as_ref() };
        floats(scope, &scope.attention_paged(&inside(&queries), cached, &sequences, scale, mask)?)
    }

    /// Keys and values as they are read from the cache.
    fn cached(&self) -> Vec<f32> {
        let Some(scales) = &self.scales else { return self.keys_values.clone() };
        let read = |(at, number): (usize, &f32)| {
            let scale = scales[at / self.shape.head_dim % scales.len()];
            E4m3::from_f32(number / scale).to_f32() * scale
        };
        self.keys_values.iter().enumerate().map(read).collect()
    }

    pub fn expected(&self) -> Vec<f64> {
        let (kv_heads, head_dim) = (self.shape.kv_heads, self.shape.head_dim);
        let columns = self.heads * head_dim;
        let (before, behind) = margins(self.activation);
        let keys_values = self.cached();
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
                    let own = context - rows + index + 1;
                    let end = self.key_ends.as_ref().map_or(own, |ends| ends[row] as usize);
                    let seen = token + first_seen(own, self.window)..token + end;
                    let vector = |token: usize, half: usize| {
                        &keys_values[((token * 2 + half) * kv_heads + kv_head) * head_dim..][..head_dim]
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
