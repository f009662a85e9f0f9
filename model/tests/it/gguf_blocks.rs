//! GGUF files whose matrices stay in blocks on a CPU. Each file is compared with a file that has
//! the same elements as F32: the logits of both must agree.

use bursar_budgets::Bytes;
use bursar_kernels::{Backend, CudaTarget, DType, Rank, Target, widen_blocks};
use bursar_model::{
    Model,
    checkpoint::{BlockType, Checkpoint},
};

use crate::{
    bench::{Bench, BenchMemory, Memory, Random, on_ranks, relative_error},
    common::golden_bytes,
    gguf::{File, Written, number},
};

const CPU: Target = Target::Cpu { threads: 2 };

/// Largest relative error that summing in another order causes over all layers.
const TOLERANCE: f32 = 1e-4;

/// Block types, with their numbers in ggml.
const KINDS: [(BlockType, u32); 8] = [
    (BlockType::Q4_0, 2),
    (BlockType::Q4_1, 3),
    (BlockType::Q5_0, 6),
    (BlockType::Q5_1, 7),
    (BlockType::Q8_0, 8),
    (BlockType::Q4_K, 12),
    (BlockType::Q5_K, 13),
    (BlockType::Q6_K, 14),
];

const F32: u32 = 0;

/// A tensor of a GGUF file.
#[derive(Clone)]
struct Listed {
    name: String,
    /// Fastest axis first.
    axes: Vec<u64>,
    kind: u32,
    bytes: Vec<u8>,
}

/// A GGUF file. Its settings are the encoded bytes of the file.
#[derive(Clone)]
struct Content {
    settings: Vec<u8>,
    count: u64,
    tensors: Vec<Listed>,
}

/// Reads a file that is known to be valid.
struct Reader<'f>(&'f [u8]);

impl<'f> Reader<'f> {
    fn take(&mut self, bytes: usize) -> &'f [u8] {
        let taken;
        (taken, self.0) = self.0.split_at(bytes);
        taken
    }

    fn number<const SIZE: usize>(&mut self) -> u64 {
        let mut eight = [0; 8];
        eight[..SIZE].copy_from_slice(self.take(SIZE));
        u64::from_le_bytes(eight)
    }

    fn text(&mut self) -> String {
        let bytes = self.number::<8>() as usize;
        String::from_utf8(self.take(bytes).to_vec()).expect("UTF-8")
    }

    fn skip_value(&mut self, kind: u64) {
        match kind {
            0 | 1 | 7 => self.take(1),
            2 | 3 => self.take(2),
            4..=6 => self.take(4),
            8 => {
                let bytes = self.number::<8>() as usize;
                self.take(bytes)
            }
            9 => {
                let (kind, count) = (self.number::<4>(), self.number::<8>());
                (0..count).for_each(|_| self.skip_value(kind));
                &[]
            }
            _ => self.take(8),
        };
    }
}

impl Content {
    /// Reads a file whose tensors are F32, F16 or BF16.
    fn of(file: &[u8]) -> Self {
        let mut reader = Reader(&file[8..]);
        let (tensors, count) = (reader.number::<8>(), reader.number::<8>());
        let start = reader.0;
        for _ in 0..count {
            reader.text();
            let kind = reader.number::<4>();
            reader.skip_value(kind);
        }
        let settings = start[..start.len() - reader.0.len()].to_vec();
        let listed: Vec<_> = (0..tensors)
            .map(|_| {
                let (name, axes) = (reader.text(), reader.number::<4>());
                let axes: Vec<_> = (0..axes).map(|_| reader.number::<8>()).collect();
                (name, axes, reader.number::<4>() as u32, reader.number::<8>() as usize)
            })
            .collect();
        let data = (file.len() - reader.0.len()).next_multiple_of(32);
        let tensors = listed.into_iter().map(|(name, axes, kind, offset)| {
            let size = if kind == F32 { 4 } else { 2 };
            let bytes = file[data + offset..][..axes.iter().product::<u64>() as usize * size].to_vec();
            Listed { name, axes, kind, bytes }
        });
        Content { settings, count, tensors: tensors.collect() }
    }

    fn file(&self) -> File {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend(self.count.to_le_bytes());
        bytes.extend(&self.settings);
        let mut data = Vec::new();
        for Listed { name, axes, kind, bytes: of_tensor } in &self.tensors {
            bytes.extend((name.len() as u64).to_le_bytes());
            bytes.extend(name.as_bytes());
            bytes.extend((axes.len() as u32).to_le_bytes());
            axes.iter().for_each(|axis| bytes.extend(axis.to_le_bytes()));
            bytes.extend(kind.to_le_bytes());
            bytes.extend((data.len() as u64).to_le_bytes());
            data.extend(of_tensor);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        File::of(&[bytes, data].concat())
    }

    /// Replaces each matrix for which `choose` gives a type by random blocks. Returns the file with
    /// blocks, and the file with their elements.
    fn in_blocks(&self, choose: impl Fn(&str) -> Option<BlockType>) -> [Content; 2] {
        let (mut random, mut packed, mut wide) = (Random::new(5), self.clone(), self.clone());
        for (packed, wide) in packed.tensors.iter_mut().zip(&mut wide.tensors) {
            let Some(kind) = choose(&packed.name) else { continue };
            let elements = packed.axes.iter().product::<u64>() as usize;
            assert!(
                packed.axes[0].is_multiple_of(kind.elements() as u64),
                "{} does not consist of whole blocks",
                packed.name
            );
            packed.bytes = blocks(&mut random, kind, elements / kind.elements());
            let mut numbers = vec![0.0f32; elements];
            widen_blocks(kind, &packed.bytes, &mut numbers);
            wide.bytes = numbers.into_iter().flat_map(f32::to_le_bytes).collect();
            wide.kind = F32;
            packed.kind = KINDS.iter().find(|(known, _)| *known == kind).expect("a known type").1;
        }
        [packed, wide]
    }
}

/// Random blocks whose elements are about as large as trained weights.
fn blocks(random: &mut Random, kind: BlockType, count: usize) -> Vec<u8> {
    let block = |random: &mut Random| -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..kind.bytes()).map(|_| random.below(256) as u8).collect();
        let mut half =
            |at: usize, number: f32| bytes[at..at + 2].copy_from_slice(&half::f16::from_f32(number).to_le_bytes());
        match kind {
            BlockType::Q4_0 | BlockType::Q5_0 => half(0, 0.01),
            BlockType::Q8_0 => half(0, 0.001),
            BlockType::Q4_1 => [(0, 0.01), (2, -0.08)].into_iter().for_each(|(at, number)| half(at, number)),
            BlockType::Q5_1 => [(0, 0.01), (2, -0.15)].into_iter().for_each(|(at, number)| half(at, number)),
            BlockType::Q4_K | BlockType::Q5_K => {
                [(0, 0.0004), (2, 0.002)].into_iter().for_each(|(at, number)| half(at, number))
            }
            BlockType::Q6_K => half(208, 0.00004),
        }
        bytes
    };
    (0..count).flat_map(|_| block(random)).collect()
}

/// A file of a Llama with two layers, with F32 matrices. Rows have 256 elements, or 512 in
/// `ffn_down`.
fn llama(is_tied: bool) -> Content {
    let written = Written::good()
        .with("llama.block_count", number(2))
        .with("llama.embedding_length", number(256))
        .with("llama.feed_forward_length", number(512))
        .with("llama.attention.head_count", number(4))
        .with("llama.attention.head_count_kv", number(2));
    let mut settings = Vec::new();
    for (name, value) in &written.settings {
        settings.extend(crate::gguf::text(name));
        settings.extend(value);
    }
    let listed = |name: String, axes: &[u64]| {
        let bytes = 1.0f32.to_le_bytes().repeat(axes.iter().product::<u64>() as usize);
        Listed { name, axes: axes.to_vec(), kind: F32, bytes }
    };
    let mut tensors = vec![listed("token_embd.weight".into(), &[256, 5]), listed("output_norm.weight".into(), &[256])];
    if !is_tied {
        tensors.push(listed("output.weight".into(), &[256, 5]));
    }
    for layer in 0..2 {
        let axes: [(&str, &[u64]); 9] = [
            ("attn_norm", &[256]),
            ("ffn_norm", &[256]),
            ("attn_q", &[256, 256]),
            ("attn_k", &[256, 128]),
            ("attn_v", &[256, 128]),
            ("attn_output", &[256, 256]),
            ("ffn_gate", &[256, 512]),
            ("ffn_up", &[256, 512]),
            ("ffn_down", &[512, 256]),
        ];
        tensors.extend(axes.map(|(part, axes)| listed(format!("blk.{layer}.{part}.weight"), axes)));
    }
    Content { settings, count: written.settings.len() as u64, tensors }
}

fn is_matrix(name: &str) -> bool {
    !name.contains("norm")
}

/// The logits of a prompt in two chunks, and of three tokens after it. The second chunk has too
/// many rows to be multiplied by blocks directly, so the blocks are dequantized first.
fn logits<B: Backend>(bench: &Bench<B>, tokens: usize) -> Vec<Vec<f32>> {
    let prompt = (0..30).map(|at| (at * 7 % tokens) as u32).collect();
    let mut sequence = bench.start(bench.model.config().lay_out(prompt, &[]).expect("the prompt is laid out"), &[]);
    let mut all = bench.prefill(&mut sequence, &[3, usize::MAX]);
    for token in 0..3 {
        sequence.push(token);
        all.extend(bench.step(&mut [sequence.next_chunk(1)]));
    }
    bench.end(sequence);
    all
}

fn opened(content: &Content) -> Checkpoint {
    content.file().open().expect("the checkpoint opens")
}

fn planned(content: &Content, target: Target) -> Model {
    Model::plan(&opened(content), &target).expect("the model can be planned")
}

#[track_caller]
fn assert_alike(found: &[Vec<f32>], expected: &[Vec<f32>]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!(expected.iter().any(|logit| logit.abs() > 1e-3), "some logit is not close to zero: {expected:?}");
        let error = relative_error(found, expected);
        assert!(error < TOLERANCE, "{error:.1e}");
    }
}

#[test]
fn a_model_in_mixed_block_types_matches_its_widened_copy() {
    for is_tied in [true, false] {
        for first in 0..KINDS.len() {
            // Tensors that are fused into one weight have different types.
            let choose = |name: &str| {
                let at = name.bytes().fold(first, |sum, byte| sum + usize::from(byte));
                is_matrix(name).then(|| KINDS[at % KINDS.len()].0)
            };
            let [packed, wide] = llama(is_tied).in_blocks(choose);
            let [ours, theirs] = [&packed, &wide].map(|content| logits(&Bench::of(opened(content), 2), 5));
            assert_alike(&ours, &theirs);
        }
    }
}

#[test]
fn a_plan_counts_the_bytes_of_the_blocks() {
    let [packed, wide] = llama(true).in_blocks(|name| is_matrix(name).then_some(BlockType::Q4_K));
    let (model, twin) = (planned(&packed, CPU), planned(&wide, CPU));
    let of_blocks: usize = packed.tensors.iter().filter(|it| it.kind != F32).map(|it| it.bytes.len()).sum();
    let found = model.block_weights().expect("the weights stay in blocks");
    assert_eq!((found.bytes, found.widened.len()), (Bytes(of_blocks as u64), 0));
    assert_eq!(model.parameters(), twin.parameters());
    assert!(twin.block_weights().is_none());
    // 4.5 bits for each element instead of 32.
    let saved = twin.weight_bytes() - model.weight_bytes();
    let expected = of_blocks as u64 * (32 * 256 - 144 * 8) / (144 * 8);
    assert!(saved.0.abs_diff(expected) < 30 * 256, "{saved} saved, expected about {expected}");
    // Nothing changes on a GPU.
    let gpu = Target::Cuda(CudaTarget { capability: (9, 0), sms: 132, activation: DType::BF16 });
    let [packed, wide] = [&packed, &wide].map(|content| planned(content, gpu));
    assert_eq!(packed.weight_bytes(), wide.weight_bytes());
    assert!(packed.block_weights().is_none());
}

#[test]
fn ranks_keep_whole_blocks_and_widen_split_weights() {
    // Two ranks have 128 columns of `attn_output` each, which is half a block of Q6_K and four of
    // Q5_0, and 256 columns of `ffn_down`.
    for (kind, widened) in
        [(BlockType::Q6_K, vec!["model.layers.0.self_attn.o_proj.weight"]), (BlockType::Q5_0, vec![])]
    {
        let [packed, wide] = llama(true).in_blocks(|name| is_matrix(name).then_some(kind));
        let model = Model::plan_rank(&opened(&packed), &CPU, Rank::new(1, 2)).expect("the model can be planned");
        let found = &model.block_weights().expect("weights stay in blocks").widened;
        assert_eq!(found.len(), 2 * widened.len(), "{found:?}");
        assert!(widened.iter().all(|name| found.iter().any(|found| found == name)), "{found:?}");
        let expected = logits(&Bench::of(opened(&wide), 2), 5);
        let file = packed.file();
        for ours in on_ranks(2, |cpu| {
            let memory = Memory::new(BenchMemory::GOLDEN.capacity);
            logits(&Bench::on(file.open().expect("the checkpoint opens"), cpu, memory, BenchMemory::GOLDEN), 5)
        }) {
            assert_alike(&ours, &expected);
        }
    }
}

#[test]
fn gemma_in_blocks_matches_its_widened_copy() {
    // The other matrices have rows of 48 or 60 elements, which are not whole blocks.
    let kinds = [("attn_output", BlockType::Q4_0), ("per_layer_token_embd", BlockType::Q5_1)];
    let content = Content::of(&golden_bytes("gguf/gemma4_sharing.gguf"));
    let choose = |name: &str| Some(kinds.iter().find(|(part, _)| name.contains(part))?.1);
    let [packed, wide] = content.in_blocks(choose);
    let widened = planned(&packed, CPU).block_weights().expect("weights stay in blocks").widened.clone();
    assert!(widened.is_empty(), "{widened:?}");
    let [ours, theirs] = [&packed, &wide].map(|content| logits(&Bench::of(opened(content), 2), 300));
    assert_alike(&ours, &theirs);
}

#[test]
fn hybrids_and_mixtures_in_blocks_match_their_widened_copies() {
    for name in ["qwen3_5", "qwen3_5_moe"] {
        let content = Content::of(&golden_bytes(&format!("gguf/{name}.gguf")));
        let whole = |name: &str, axes: &[u64]| {
            let is_matrix = axes.len() > 1 && axes[0].is_multiple_of(32);
            is_matrix && !["ffn_gate_inp", "ssm_conv1d", "ssm_alpha"].iter().any(|part| name.contains(part))
        };
        let axes = |name: &str| content.tensors.iter().find(|it| it.name == name).expect("it is listed").axes.clone();
        let choose = |name: &str| {
            let kind = if name.contains("up") { BlockType::Q8_0 } else { BlockType::Q4_1 };
            whole(name, &axes(name)).then_some(kind)
        };
        let [packed, wide] = content.in_blocks(choose);
        let found = planned(&packed, CPU).block_weights().expect("weights stay in blocks").widened.clone();
        // Only these tensors are dequantized while they load: the columns of `out_proj` are
        // reordered, and the gates are small.
        let is_known = |name: &String| ["out_proj", "in_proj_b"].iter().any(|part| name.contains(part));
        assert!(!found.is_empty() && found.iter().all(is_known), "{found:?}");
        let [ours, theirs] = [&packed, &wide].map(|content| logits(&Bench::of(opened(content), 2), 300));
        assert_alike(&ours, &theirs);
    }
}
