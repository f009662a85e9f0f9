//! Layers with a recurrent state: steps with decoding sequences, prompts, padding and snapshots,
//! and their expected results in `f64`.

use std::ops::Range;

use bursar_kernels::{
    ops::gated_delta::{DeltaInputs, NO_STATE, SNAPSHOTS, StateSequences},
    *,
};
use half::{bf16, f16};

use super::{
    Random, narrowed,
    pass::starts,
    rounded,
    wide::{Wide, floats, inside, wide},
};

/// One sequence of a step: the number of its rows, the number of its tokens including these rows,
/// and the row counts after which snapshots are taken. A sequence without tokens is padding.
pub type Rows = (usize, usize, Vec<usize>);

/// A step of the causal convolution or of the gated delta rule over one layer with states. The
/// leading sequences of one row are the decoding sequences.
#[derive(Clone, Debug)]
pub struct Step {
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    pub taps: usize,
    pub sequences: Vec<Rows>,
    /// Middle of the logarithms of the heads' rates of decay, which differ from it by up to 1.
    pub rate: f32,
    pub of: Of,
    pub state_dtype: StateDtype,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Of {
    /// The convolution's output and all states.
    Conv,
    /// The output of the gated delta rule and all states.
    Delta,
    /// All states after the gated delta rule. Their only large error is the rounding to the type of
    /// the matrices, because no kernel computes these cases in chunks with f16 operands: all
    /// sequences have at most `SHORT` rows, or keys do not have 128 elements.
    DeltaStates,
}

/// The rows and the slots of one sequence.
struct SequenceSlots {
    rows: Range<usize>,
    context: usize,
    read: u32,
    write: u32,
    snapshots: Vec<(usize, u32)>,
}

/// Maximum number of rows of a sequence for which every target computes the gated delta rule token
/// by token.
const SHORT: usize = 4;

/// Random inputs other than the rows, drawn before the rows.
struct Inputs {
    weight: Vec<f32>,    // [channels, taps]
    log_decay: Vec<f32>, // [value_heads]
    bias: Vec<f32>,      // [value_heads]
    conv: Vec<f32>,      // [slots, taps - 1, channels]
    matrices: Vec<f32>,  // [slots, value_heads, value_dim, key_dim]
}

/// Numbers in their memory format.
fn stored(dtype: DType, numbers: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F16 => numbers.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        DType::BF16 => numbers.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        _ => numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

/// The first `count` numbers in `bytes`.
fn read(dtype: DType, bytes: &[u8], count: usize) -> Vec<f32> {
    match dtype {
        DType::F16 => bytes.as_chunks().0[..count].iter().map(|x| f16::from_le_bytes(*x).to_f32()).collect(),
        DType::BF16 => bytes.as_chunks().0[..count].iter().map(|x| bf16::from_le_bytes(*x).to_f32()).collect(),
        _ => bytes.as_chunks().0[..count].iter().map(|x| f32::from_le_bytes(*x)).collect(),
    }
}

impl Step {
    pub fn cases() -> Vec<Step> {
        let step = |[key_heads, value_heads, key_dim, value_dim]: [usize; 4], taps, sequences: &[Rows], rate, of| {
            let sequences = sequences.to_vec();
            Step { key_heads, value_heads, key_dim, value_dim, taps, sequences, rate, of, state_dtype: StateDtype::F32 }
        };
        let one = |context| (1, context, vec![]);
        let decoding = vec![one(7), one(1), one(0), (1, 9, vec![1]), one(1000)];
        let rest = [(3, 3, vec![]), (0, 8, vec![]), (65, 90, vec![2, 64]), (2, 0, vec![]), (20, 21, vec![5, 20])];
        let mixed = [decoding.clone(), rest.to_vec()].concat();
        let prompts =
            [(128, 128, vec![128]), (1, 2, vec![]), (63, 70, vec![]), (129, 200, vec![64, 65]), (2, 2, vec![1])];
        // A step that verifies drafts. All padding rows belong to the first padding sequence.
        let verifying = vec![(4, 30, vec![1]), one(9), (SHORT, SHORT, vec![2, 4]), (3, 0, vec![]), (0, 0, vec![])];
        let mut cases = Vec::new();
        for (taps, sequences) in [(2, &mixed), (3, &decoding), (4, &mixed), (4, &prompts.to_vec()), (4, &verifying)] {
            for dims in [[1, 2, 16, 5], [2, 2, 32, 16]] {
                cases.push(step(dims, taps, sequences, 0.0, Of::Conv));
            }
        }
        for rate in [2.0, -2.0, -12.0] {
            for (dims, sequences) in [
                ([2, 4, 128, 64], &mixed),
                ([1, 1, 128, 32], &prompts.to_vec()),
                ([1, 3, 128, 24], &mixed),
                ([2, 6, 16, 12], &mixed),
                ([1, 2, 256, 40], &prompts.to_vec()),
            ] {
                cases.push(step(dims, 4, sequences, rate, Of::Delta));
            }
            cases.push(step([2, 6, 48, 20], 4, &mixed, rate, Of::DeltaStates));
            cases.push(step([2, 4, 128, 128], 4, &verifying, rate, Of::DeltaStates));
            cases.push(step([2, 4, 128, 128], 4, &decoding, rate, Of::DeltaStates));
            // With this many sequences, a GPU gives several rows of a matrix to the same lanes.
            let many: Vec<Rows> = (0..18).map(|sequence| one(1 + sequence % 3)).collect();
            cases.push(step([2, 4, 128, 128], 4, &many, rate, Of::DeltaStates));
            cases.push(step([2, 4, 128, 72], 4, &many, rate, Of::Delta));
        }
        let rounded = |case: &Step| Step { state_dtype: StateDtype::Bf16, ..case.clone() };
        let with_rounded_matrices: Vec<_> = cases.iter().filter(|case| case.of != Of::Conv).map(rounded).collect();
        cases.extend(with_rounded_matrices);
        cases
    }

    /// The tolerance for `assert_close`. `rounding` is the largest error of rounding to the type of
    /// activations.
    pub fn tolerance(&self, rounding: f64) -> f64 {
        match self.of {
            Of::Conv => rounding,
            // Chunks multiply f16 operands, whose rounding errors add up in the state.
            Of::Delta => 1.0 / 384.0,
            Of::DeltaStates if self.state_dtype == StateDtype::Bf16 => 1.0 / 512.0 + 1e-5,
            Of::DeltaStates => 1e-5,
        }
    }

    fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// Elements of all matrices in a slot.
    fn elements(&self) -> usize {
        self.value_heads * self.value_dim * self.key_dim
    }

    fn shape(&self, activation: DType) -> StateShape {
        StateShape {
            layers: 1,
            channels: self.channels(),
            conv_rows: self.taps - 1,
            key_heads: self.key_heads,
            value_heads: self.value_heads,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            activation,
            state_dtype: self.state_dtype,
        }
    }

    /// Bytes from the start of a slot to its matrices.
    fn matrices_at(&self, activation: DType) -> usize {
        let conv = activation.bytes((self.taps - 1) * self.channels());
        conv.as_usize().next_multiple_of(256)
    }

    fn rows(&self) -> usize {
        self.sequences.iter().map(|(rows, ..)| rows).sum()
    }

    /// The rows and slots of each sequence, and the number of slots. Every second sequence writes
    /// the slot that it reads. One slot is neither read nor written.
    fn sequences(&self) -> (Vec<SequenceSlots>, usize) {
        let slots = self.sequences.iter().map(|(.., snapshots)| 2 + snapshots.len()).sum::<usize>() + 1;
        let mut free = Random::new(11).shuffled(slots).into_iter();
        let mut next = || free.next().expect("there is a slot for each");
        let mut row = 0;
        let sequence = |(index, (rows, context, snapshots)): (usize, &Rows)| {
            let rows = row..row + rows;
            row = rows.end;
            let (read, other) = (next(), next());
            let write = if *context == 0 { NO_STATE } else { [read, other][index % 2] };
            let snapshots = snapshots.iter().map(|after| (*after, next())).collect();
            SequenceSlots { rows, context: *context, read, write, snapshots }
        };
        (self.sequences.iter().enumerate().map(sequence).collect(), slots)
    }

    fn inputs(&self, slots: usize, random: &mut Random) -> Inputs {
        let kept = self.taps - 1;
        Inputs {
            weight: random.floats(self.channels() * self.taps),
            log_decay: random.floats(self.value_heads).iter().map(|x| x + self.rate).collect(),
            bias: random.floats(self.value_heads),
            conv: random.floats(slots * kept * self.channels()),
            matrices: random.floats(slots * self.elements()),
        }
    }

    /// The bytes of all slots as words. Bytes between the parts of a slot are zeros.
    fn image(&self, activation: DType, inputs: &Inputs) -> Vec<f32> {
        let kept = (self.taps - 1) * self.channels();
        let slots = inputs.conv.chunks(kept).zip(inputs.matrices.chunks(self.elements()));
        let slot = |(conv, matrices): (&[f32], &[f32])| -> Vec<u8> {
            let mut bytes = stored(activation, conv);
            bytes.resize(self.matrices_at(activation), 0);
            bytes.extend(stored(self.state_dtype.dtype(), matrices));
            bytes.resize(self.shape(activation).slot_bytes().as_usize(), 0);
            bytes
        };
        let bytes: Vec<u8> = slots.flat_map(slot).collect();
        bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
    }

    /// The part of all slots that the operation may write: the inverse of `image`.
    fn states(&self, activation: DType, image: &[f32]) -> Vec<f32> {
        let kept = (self.taps - 1) * self.channels();
        let of_slot = |slot: &[f32]| -> Vec<f32> {
            let bytes: Vec<u8> = slot.iter().flat_map(|word| word.to_le_bytes()).collect();
            if self.of == Of::Conv {
                return read(activation, &bytes, kept);
            }
            read(self.state_dtype.dtype(), &bytes[self.matrices_at(activation)..], self.elements())
        };
        let words = self.shape(activation).slot_bytes().as_usize() / DType::F32.size();
        image.chunks(words).flat_map(of_slot).collect()
    }

    pub fn run<B: Backend>(&self, scope: &Scope<'_, B>, random: &mut Random) -> Result<Vec<f32>, KernelError> {
        let activation = scope.target().activation();
        let (sequences, slots) = self.sequences();
        let inputs = self.inputs(slots, random);
        let image = self.image(activation, &inputs);
        let memory = scope.upload([image.len()], &image)?;
        // SAFETY: the memory lives as long as the layer, and nothing else uses it.
        let layer = unsafe { StateLayer::new(memory.address(), slots, self.shape(activation)) };
        let sequences = uploaded(scope, &sequences)?;
        let rows = self.rows();
        let x = wide(scope, rows, self.channels(), random)?;
        let mut found = if self.of == Of::Conv {
            let weight = narrowed(scope, [self.channels(), self.taps], activation, &inputs.weight)?;
            floats(scope, &scope.causal_conv(&inside(&x), &weight, &layer, &sequences)?)?
        } else {
            let [update, decay] = [(); 2].map(|()| wide(scope, rows, self.value_heads, random));
            let (update, decay) = (update?, decay?);
            let operands = DeltaInputs {
                qkv: &inside(&x),
                update: &inside(&update),
                decay: &inside(&decay),
                log_decay: &scope.upload([self.value_heads], &inputs.log_decay)?,
                bias: &scope.upload([self.value_heads], &inputs.bias)?,
            };
            floats(scope, &scope.gated_delta(&operands, &layer, &sequences)?)?
        };
        if self.of == Of::DeltaStates {
            found.clear();
        }
        found.extend(self.states(activation, &scope.download::<f32>(&memory)?));
        Ok(found)
    }

    pub fn expected(&self, activation: DType, random: &mut Random) -> Vec<f64> {
        let (sequences, slots) = self.sequences();
        let inputs = self.inputs(slots, random);
        let x = Wide::new(activation, self.rows(), self.channels(), random);
        let (mut out, states) = if self.of == Of::Conv {
            self.convolved(activation, &sequences, &inputs, &x)
        } else {
            let gates = [(); 2].map(|()| Wide::new(activation, self.rows(), self.value_heads, random));
            self.by_delta_rule(&sequences, &inputs, &x, &gates)
        };
        if self.of == Of::DeltaStates {
            out.clear();
        }
        out.extend(states);
        out
    }

    /// The convolution's output and the states after it.
    fn convolved(
        &self,
        activation: DType,
        sequences: &[SequenceSlots],
        inputs: &Inputs,
        x: &Wide,
    ) -> (Vec<f64>, Vec<f64>) {
        let (channels, taps, kept) = (self.channels(), self.taps, self.taps - 1);
        let (weight, before) = (rounded(activation, &inputs.weight), rounded(activation, &inputs.conv));
        let (mut out, mut states) = (vec![0.0; self.rows() * channels], before.clone());
        for sequence in sequences.iter().filter(|sequence| sequence.context > 0) {
            // Input number `at`, counted from the oldest input in the state.
            let input = |at: usize, channel: usize| match at.checked_sub(kept) {
                Some(row) => x.at(sequence.rows.start + row, channel),
                None if sequence.context == sequence.rows.len() => 0.0,
                None => before[(sequence.read as usize * kept + at) * channels + channel],
            };
            for row in 0..sequence.rows.len() {
                for channel in 0..channels {
                    let y: f64 = (0..taps).map(|tap| weight[channel * taps + tap] * input(row + tap, channel)).sum();
                    out[(sequence.rows.start + row) * channels + channel] = y / (1.0 + (-y).exp());
                }
                for slot in sequence.slots_after(row) {
                    for (at, channel) in (0..kept).flat_map(|at| (0..channels).map(move |channel| (at, channel))) {
                        states[(slot as usize * kept + at) * channels + channel] = input(row + 1 + at, channel);
                    }
                }
            }
        }
        (out, states)
    }

    /// The output of the gated delta rule and the states after it.
    fn by_delta_rule(
        &self,
        sequences: &[SequenceSlots],
        inputs: &Inputs,
        x: &Wide,
        [update, decay]: &[Wide; 2],
    ) -> (Vec<f64>, Vec<f64>) {
        let Step { key_heads, value_heads, key_dim, value_dim, .. } = *self;
        let size = value_dim * key_dim;
        let before = rounded(self.state_dtype.dtype(), &inputs.matrices);
        let (mut out, mut states) = (vec![0.0; self.rows() * value_heads * value_dim], before.clone());
        let unit = |row: usize, first: usize| -> Vec<f64> {
            let x: Vec<f64> = (first..first + key_dim).map(|column| x.at(row, column)).collect();
            let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
            x.into_iter().map(|x| x / length).collect()
        };
        for (sequence, head) in sequences.iter().flat_map(|sequence| (0..value_heads).map(move |head| (sequence, head)))
        {
            if sequence.context == 0 {
                continue;
            }
            let at = |slot: u32| (slot as usize * value_heads + head) * size;
            let mut state = vec![0.0; size];
            if sequence.context > sequence.rows.len() {
                state.copy_from_slice(&before[at(sequence.read)..][..size]);
            }
            for row in sequence.rows.clone() {
                let of_key = head / (value_heads / key_heads) * key_dim;
                let (q, k) = (unit(row, of_key), unit(row, key_heads * key_dim + of_key));
                let softplus = (1.0 + (decay.at(row, head) + f64::from(inputs.bias[head])).exp()).ln();
                let kept = (-f64::from(inputs.log_decay[head]).exp() * softplus).exp();
                let strength = 1.0 / (1.0 + (-update.at(row, head)).exp());
                for (column, state) in state.chunks_mut(key_dim).enumerate() {
                    let v = x.at(row, 2 * key_heads * key_dim + head * value_dim + column);
                    let remembered: f64 = state.iter().zip(&k).map(|(state, k)| kept * state * k).sum();
                    let change = strength * (v - remembered);
                    state.iter_mut().zip(&k).for_each(|(state, k)| *state = kept * *state + change * k);
                    let read: f64 = state.iter().zip(&q).map(|(state, q)| state * q).sum();
                    out[(row * value_heads + head) * value_dim + column] = read * (key_dim as f64).powf(-0.5);
                }
                for slot in sequence.slots_after(row - sequence.rows.start) {
                    states[at(slot)..][..size].copy_from_slice(&state);
                }
            }
        }
        (out, states)
    }
}

impl SequenceSlots {
    /// The slots to which the state is written after row `row` of the sequence.
    fn slots_after(&self, row: usize) -> impl Iterator<Item = u32> {
        let taken = self.snapshots.iter().filter(move |(after, _)| *after == row + 1).map(|(_, slot)| *slot);
        taken.chain((row + 1 == self.rows.len()).then_some(self.write))
    }
}

fn uploaded<'s, B: Backend>(
    scope: &'s Scope<'_, B>,
    sequences: &[SequenceSlots],
) -> Result<StateSequences<'s>, KernelError> {
    let lengths: Vec<usize> = sequences.iter().map(|sequence| sequence.rows.len()).collect();
    let list =
        |of: fn(&SequenceSlots) -> u32| scope.upload([sequences.len()], &sequences.iter().map(of).collect::<Vec<_>>());
    let snapshots = |of: fn(&(usize, u32)) -> u32, none: u32| {
        let of_sequence = |sequence: &SequenceSlots| {
            let mut row = [none; SNAPSHOTS];
            row.iter_mut().zip(&sequence.snapshots).for_each(|(to, snapshot)| *to = of(snapshot));
            row
        };
        scope.upload([sequences.len(), SNAPSHOTS], &sequences.iter().flat_map(of_sequence).collect::<Vec<_>>())
    };
    Ok(StateSequences {
        query_starts: scope.upload([sequences.len() + 1], &starts(0, &lengths))?,
        context_lengths: list(|sequence| sequence.context as u32)?,
        reads: list(|sequence| sequence.read)?,
        writes: list(|sequence| sequence.write)?,
        snapshot_rows: snapshots(|(rows, _)| *rows as u32, 0)?,
        snapshot_slots: snapshots(|(_, slot)| *slot, NO_STATE)?,
        single_rows: lengths.iter().take_while(|rows| **rows == 1).count(),
        short_sequences: lengths.iter().take_while(|rows| **rows <= SHORT).count(),
    })
}

/// The output of the gated delta rule for a prompt whose tokens are divided into steps at `cuts`.
/// Inputs are rounded to the type `stored`, whatever type the backend's activations have.
pub fn divided<B: Backend>(scope: &Scope<'_, B>, stored: DType, cuts: &[usize]) -> Result<Vec<f32>, KernelError> {
    let (activation, mut random) = (scope.target().activation(), Random::new(17));
    let step = Step {
        key_heads: 1,
        value_heads: 2,
        key_dim: 128,
        value_dim: 64,
        taps: 4,
        sequences: vec![],
        rate: -4.0,
        of: Of::Delta,
        state_dtype: StateDtype::F32,
    };
    let (shape, heads, tokens) = (step.shape(activation), step.value_heads, *cuts.last().expect("the last token"));
    let mut drawn = |columns: usize| -> Vec<f32> {
        rounded(stored, &random.floats(tokens * columns)).into_iter().map(|x| x as f32).collect()
    };
    let (qkv, update, decay) = (drawn(step.channels()), drawn(heads), drawn(heads));
    let memory = scope.empty_f32([shape.slot_bytes().as_usize() / DType::F32.size()])?;
    // SAFETY: the memory lives as long as the layer, and nothing else uses it.
    let layer = unsafe { StateLayer::new(memory.address(), 1, shape) };
    let mut out = Vec::new();
    for bounds in cuts.windows(2) {
        let pass = scope.scope();
        let sequence =
            SequenceSlots { rows: bounds[0]..bounds[1], context: bounds[1], read: 0, write: 0, snapshots: vec![] };
        let some = |numbers: &[f32], columns: usize| {
            narrowed(
                &pass,
                [bounds[1] - bounds[0], columns],
                activation,
                &numbers[bounds[0] * columns..bounds[1] * columns],
            )
        };
        let inputs = DeltaInputs {
            qkv: &some(&qkv, step.channels())?,
            update: &some(&update, heads)?,
            decay: &some(&decay, heads)?,
            log_decay: &pass.upload([heads], &vec![step.rate; heads])?,
            bias: &pass.upload([heads], &vec![0.5f32; heads])?,
        };
        out.extend(floats(&pass, &pass.gated_delta(&inputs, &layer, &uploaded(&pass, &[sequence])?)?)?);
    }
    Ok(out)
}
