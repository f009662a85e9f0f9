//! Layers with a recurrent state: the causal convolution and the gated delta rule match the
//! formulas of their papers, however a prompt is divided into steps.

use std::ops::Range;

use bursar_kernels::{
    ops::{
        gated_delta::{DeltaInputs, NO_STATE, SNAPSHOTS, StateSequences},
        rms_norm::RmsNorm,
    },
    *,
};

use crate::ground::{Random, RotaryKv, assert_close, compute, rounded};

const SHAPE: StateShape = StateShape {
    layers: 1,
    channels: 2 * 2 * 16 + 6 * 12,
    conv_rows: 3,
    key_heads: 2,
    value_heads: 6,
    key_dim: 16,
    value_dim: 12,
    activation: DType::F32,
    state_dtype: StateDtype::F32,
};
const WIDTH: usize = SHAPE.conv_rows + 1;
const OUT: usize = SHAPE.value_heads * SHAPE.value_dim;
const SLOTS: usize = 12;

/// The inputs of each token of a prompt.
struct Prompt {
    tokens: usize,
    x: Vec<f32>,      // [tokens, channels]
    update: Vec<f32>, // [tokens, value_heads]
    decay: Vec<f32>,  // [tokens, value_heads]
}

/// Weights that all prompts share. The logarithm of each head's rate of decay is within 1 of the
/// `rate` passed to [`new`](Weights::new).
struct Weights {
    conv: Vec<f32>, // [channels, WIDTH]
    log_decay: Vec<f32>,
    bias: Vec<f32>,
}

impl Weights {
    fn new(rate: f32) -> Self {
        let mut random = Random::new(7);
        let conv = random.floats(SHAPE.channels * WIDTH);
        let log_decay = random.floats(SHAPE.value_heads).iter().map(|x| x + rate).collect();
        Weights { conv, log_decay, bias: random.floats(SHAPE.value_heads) }
    }
}

impl Prompt {
    fn new(seed: u64, tokens: usize) -> Self {
        let mut random = Random::new(seed);
        let x = random.floats(tokens * SHAPE.channels).iter().map(|x| 2.0 * x).collect();
        let gates = |random: &mut Random| random.floats(tokens * SHAPE.value_heads).iter().map(|x| 4.0 * x).collect();
        Prompt { tokens, x, update: gates(&mut random), decay: gates(&mut random) }
    }

    /// The convolution of the whole prompt in `f64`, `[tokens, channels]`.
    fn convolved(&self, weights: &Weights) -> Vec<f64> {
        let at = |token: usize, channel: usize| f64::from(self.x[token * SHAPE.channels + channel]);
        let mut out = Vec::new();
        for token in 0..self.tokens {
            for channel in 0..SHAPE.channels {
                let taps = (0..WIDTH).filter(|tap| token + tap + 1 >= WIDTH);
                let weight = |tap: usize| f64::from(weights.conv[channel * WIDTH + tap]);
                let sum: f64 = taps.map(|tap| weight(tap) * at(token + tap + 1 - WIDTH, channel)).sum();
                out.push(sum / (1.0 + (-sum).exp()));
            }
        }
        out
    }

    /// The gated delta rule over the whole prompt in `f64`, `[tokens, OUT]`, with the state
    /// `[key_dim, value_dim]` of the paper.
    fn expected(&self, weights: &Weights) -> Vec<f64> {
        let StateShape { key_heads, value_heads, key_dim, value_dim, channels, .. } = SHAPE;
        let qkv = self.convolved(weights);
        let unit = |x: &[f64]| -> Vec<f64> {
            let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
            x.iter().map(|x| x / length).collect()
        };
        let mut out = vec![0.0; self.tokens * OUT];
        for head in 0..value_heads {
            let mut state = vec![vec![0.0; value_dim]; key_dim];
            for token in 0..self.tokens {
                let row = &qkv[token * channels..][..channels];
                let of_key = head / (value_heads / key_heads) * key_dim;
                let (q, k) = (unit(&row[of_key..][..key_dim]), unit(&row[key_heads * key_dim + of_key..][..key_dim]));
                let v = &row[2 * key_heads * key_dim + head * value_dim..][..value_dim];
                let gate = |numbers: &[f32]| f64::from(numbers[token * value_heads + head]);
                let softplus = (1.0 + (gate(&self.decay) + f64::from(weights.bias[head])).exp()).ln();
                let decay = (-f64::from(weights.log_decay[head]).exp() * softplus).exp();
                let strength = 1.0 / (1.0 + (-gate(&self.update)).exp());
                state.iter_mut().flatten().for_each(|s| *s *= decay);
                for column in 0..value_dim {
                    let remembered: f64 = (0..key_dim).map(|i| state[i][column] * k[i]).sum();
                    let change = strength * (v[column] - remembered);
                    (0..key_dim).for_each(|i| state[i][column] += k[i] * change);
                    let sum: f64 = (0..key_dim).map(|i| state[i][column] * q[i]).sum();
                    out[token * OUT + head * value_dim + column] = sum * (key_dim as f64).powf(-0.5);
                }
            }
        }
        out
    }
}

/// The rows of a sequence in a step.
struct SequenceRows<'a> {
    prompt: &'a Prompt,
    tokens: Range<usize>,
    read: u32,
    write: u32,
    /// Tokens of the prompt after which the state is written to a slot.
    snapshots: Vec<(usize, u32)>,
}

impl<'a> SequenceRows<'a> {
    /// Tokens of a sequence whose state is read from and written to one slot.
    fn of(prompt: &'a Prompt, tokens: Range<usize>, slot: u32) -> Self {
        SequenceRows { prompt, tokens, read: slot, write: slot, snapshots: Vec::new() }
    }
}

/// Runs one step and returns the output of each sequence, `[tokens, OUT]`.
fn step(
    scope: &Scope<'_, Cpu>,
    layer: &StateLayer,
    weights: &Weights,
    sequences: &[SequenceRows<'_>],
) -> Result<Vec<Vec<f32>>, KernelError> {
    let pass = scope.scope();
    let rows: usize = sequences.iter().map(|sequence| sequence.tokens.len()).sum();
    let gather = |of: fn(&Prompt) -> &Vec<f32>, columns: usize| -> Vec<f32> {
        let part = |sequence: &SequenceRows<'_>| {
            of(sequence.prompt)[sequence.tokens.start * columns..sequence.tokens.end * columns].to_vec()
        };
        sequences.iter().flat_map(part).collect()
    };
    let mut starts = vec![0u32];
    sequences.iter().for_each(|sequence| starts.push(starts[starts.len() - 1] + sequence.tokens.len() as u32));
    let list = |of: fn(&SequenceRows<'_>) -> u32| {
        pass.upload([sequences.len()], &sequences.iter().map(of).collect::<Vec<u32>>())
    };
    let snapshots = |of: fn(&SequenceRows<'_>, (usize, u32)) -> u32, none: u32| {
        let of_sequence = |sequence: &SequenceRows<'_>| {
            let mut row = [none; SNAPSHOTS];
            row.iter_mut().zip(&sequence.snapshots).for_each(|(to, snapshot)| *to = of(sequence, *snapshot));
            row
        };
        pass.upload([sequences.len(), SNAPSHOTS], &sequences.iter().flat_map(of_sequence).collect::<Vec<u32>>())
    };
    let sequences = StateSequences {
        query_starts: pass.upload([starts.len()], &starts)?,
        context_lengths: list(|sequence| sequence.tokens.end as u32)?,
        reads: list(|sequence| sequence.read)?,
        writes: list(|sequence| sequence.write)?,
        snapshot_rows: snapshots(|sequence, (tokens, _)| (tokens - sequence.tokens.start) as u32, 0)?,
        snapshot_slots: snapshots(|_, (_, slot)| slot, NO_STATE)?,
        single_rows: 0,
        short_sequences: 0,
    };
    let x = pass.upload([rows, SHAPE.channels], &gather(|prompt| &prompt.x, SHAPE.channels))?;
    let conv = pass.upload([SHAPE.channels, WIDTH], &weights.conv)?;
    let update = pass.upload([rows, SHAPE.value_heads], &gather(|prompt| &prompt.update, SHAPE.value_heads))?;
    let decay = pass.upload([rows, SHAPE.value_heads], &gather(|prompt| &prompt.decay, SHAPE.value_heads))?;
    let log_decay = pass.upload([SHAPE.value_heads], &weights.log_decay)?;
    let bias = pass.upload([SHAPE.value_heads], &weights.bias)?;
    let convolved = pass.causal_conv(&x, &conv, layer, &sequences)?;
    let inner = pass.scope();
    let inputs = DeltaInputs { qkv: &convolved, update: &update, decay: &decay, log_decay: &log_decay, bias: &bias };
    let out = inner.download(&inner.gated_delta(&inputs, layer, &sequences)?)?;
    Ok(starts.windows(2).map(|bounds| out[bounds[0] as usize * OUT..bounds[1] as usize * OUT].to_vec()).collect())
}

/// Runs `story` with a layer of `SLOTS` slots full of NaN.
fn with_layer<T>(threads: usize, story: impl FnOnce(&Scope<'_, Cpu>, &StateLayer) -> Result<T, KernelError>) -> T {
    with_state_dtype(StateDtype::F32, threads, story)
}

fn with_state_dtype<T>(
    state_dtype: StateDtype,
    threads: usize,
    story: impl FnOnce(&Scope<'_, Cpu>, &StateLayer) -> Result<T, KernelError>,
) -> T {
    let shape = StateShape { state_dtype, ..SHAPE };
    compute(threads, |scope| {
        let bytes = shape.slot_bytes().as_usize() * SLOTS;
        let memory = scope.empty_f32([bytes / DType::F32.size()])?;
        // SAFETY: the memory lives as long as the layer, and nothing else uses it.
        let layer = unsafe { StateLayer::new(memory.address(), SLOTS, shape) };
        story(&scope.scope(), &layer)
    })
}

/// The output for a whole prompt in one step.
fn whole(weights: &Weights, prompt: &Prompt) -> Vec<f32> {
    with_layer(1, |scope, layer| step(scope, layer, weights, &[SequenceRows::of(prompt, 0..prompt.tokens, 3)]))
        .remove(0)
}

#[test]
fn linear_attention_matches_the_papers_recurrence() {
    // Rates for which a state decays at once, within tens of tokens, and hardly at all.
    for rate in [2.0, -2.0, -12.0] {
        let weights = Weights::new(rate);
        for tokens in [1, 2, 3, 4, 63, 64, 65, 200] {
            let prompt = Prompt::new(tokens as u64, tokens);
            let what = format!("{tokens} tokens, rate {rate}");
            assert_close(&what, &whole(&weights, &prompt), &prompt.expected(&weights), 2e-5);
        }
    }
}

#[test]
fn the_state_is_accurate_after_ten_thousand_steps() {
    for rate in [-2.0, -12.0] {
        let (weights, prompt) = (Weights::new(rate), Prompt::new(1, 10_000));
        let found = whole(&weights, &prompt);
        let expected = prompt.expected(&weights);
        let last = 9_900 * OUT..;
        assert_close("the last hundred tokens", &found[last.clone()], &expected[last], 5e-5);
    }
}

/// States in bf16 are rounded once per decoded token. If a state hardly decays, changes below half
/// a unit in the last place are lost. `benches/hybrid.md` has the errors, relative to the output.
#[test]
fn the_error_of_bf16_states_is_bounded() {
    for (rate, least, most) in [(-2.0, 0.001, 0.01), (-6.0, 0.001, 0.1), (-12.0, 0.005, 0.1)] {
        let (weights, prompt) = (Weights::new(rate), Prompt::new(1, 2_000));
        let expected = prompt.expected(&weights);
        let error = |dtype: StateDtype| {
            let found = with_state_dtype(dtype, 1, |scope, layer| {
                let each = |token| step(scope, layer, &weights, &[SequenceRows::of(&prompt, token..token + 1, 3)]);
                (0..prompt.tokens).map(|token| Ok(each(token)?.remove(0))).collect::<Result<Vec<_>, KernelError>>()
            });
            let found = found.concat();
            let last = 1_900 * OUT..;
            let squares = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|x| x * x).sum::<f64>();
            let differences = found[last.clone()].iter().zip(&expected[last.clone()]).map(|(a, b)| f64::from(*a) - b);
            (squares(&mut differences.into_iter()) / squares(&mut expected[last].iter().copied())).sqrt()
        };
        let (f32, bf16) = (error(StateDtype::F32), error(StateDtype::Bf16));
        println!("rate {rate}: {f32:.1e} in f32, {bf16:.1e} in bf16");
        assert!(f32 < 1e-5, "rate {rate}: {f32}");
        assert!((least..most).contains(&bf16), "rate {rate}: {bf16}");
    }
}

#[test]
fn chunking_and_batching_do_not_change_the_bits_of_states() {
    let (weights, prompt, other) = (Weights::new(-2.0), Prompt::new(1, 150), Prompt::new(2, 90));
    let (alone, of_other) = (whole(&weights, &prompt), whole(&weights, &other));
    for (threads, cuts) in [(1, vec![0, 1, 2, 3, 150]), (2, vec![0, 64, 128, 150]), (3, vec![0, 70, 71, 100, 150])] {
        let (found, of_adjacent) = with_layer(threads, |scope, layer| {
            let (mut found, mut of_adjacent) = (Vec::new(), Vec::new());
            for (index, bounds) in cuts.windows(2).enumerate() {
                let adjacent = 20 * index..20 * (index + 1);
                let sequences =
                    [SequenceRows::of(&other, adjacent, 5), SequenceRows::of(&prompt, bounds[0]..bounds[1], 9)];
                let parts = step(scope, layer, &weights, &sequences)?;
                of_adjacent.extend_from_slice(&parts[0]);
                found.extend_from_slice(&parts[1]);
            }
            Ok((found, of_adjacent))
        });
        assert!(found == alone, "{cuts:?}");
        assert!(of_adjacent == of_other[..of_adjacent.len()], "{cuts:?}");
    }
}

#[test]
fn a_sequence_resumes_from_a_snapshot_taken_inside_a_step() {
    let (weights, prompt) = (Weights::new(-2.0), Prompt::new(1, 200));
    let alone = whole(&weights, &prompt);
    with_layer(2, |scope, layer| {
        let first = SequenceRows { snapshots: vec![(64, 1), (130, 2)], ..SequenceRows::of(&prompt, 0..170, 0) };
        assert!(
            step(scope, layer, &weights, &[first])?[0] == alone[..170 * OUT],
            "taking snapshots does not change the result"
        );
        // Two sequences resume from one snapshot and write to separate slots, and a third sequence
        // resumes from the other snapshot.
        let resume = |from: usize, read, write| SequenceRows { read, ..SequenceRows::of(&prompt, from..200, write) };
        let parts = step(scope, layer, &weights, &[resume(64, 1, 3), resume(130, 2, 4), resume(64, 1, 5)])?;
        assert!(parts[0] == alone[64 * OUT..] && parts[1] == alone[130 * OUT..] && parts[2] == parts[0]);
        // The snapshots themselves are unchanged, and a sequence may also continue in the slot of a
        // snapshot.
        let again = step(scope, layer, &weights, &[resume(64, 1, 1)])?;
        assert!(again[0] == alone[64 * OUT..]);
        Ok(())
    });
}

/// A sequence of 11 tokens that decodes one of them, and padding.
fn one_token_and_padding<'a>(pass: &'a Scope<'_, Cpu>) -> Result<StateSequences<'a>, KernelError> {
    let list = |numbers: [u32; 2]| pass.upload([2], &numbers);
    Ok(StateSequences {
        query_starts: pass.upload([3], &[0u32, 1, 2])?,
        context_lengths: list([11, 0])?,
        reads: list([0, 0])?,
        writes: list([0, NO_STATE])?,
        snapshot_rows: pass.upload([2, SNAPSHOTS], &[0u32; 2 * SNAPSHOTS])?,
        snapshot_slots: pass.upload([2, SNAPSHOTS], &[NO_STATE; 2 * SNAPSHOTS])?,
        single_rows: 2,
        short_sequences: 2,
    })
}

#[test]
fn more_one_row_sequences_than_rows_are_refused() {
    let (weights, width) = (Weights::new(-2.0), SHAPE.channels);
    let of_rows = |rows: usize| {
        with_layer(1, |scope, layer| {
            let pass = scope.scope();
            let x = pass.upload([rows, width], &vec![0.0f32; rows * width])?;
            let conv = pass.upload([width, WIDTH], &weights.conv)?;
            Ok(pass.causal_conv(&x, &conv, layer, &one_token_and_padding(&pass)?).map(drop))
        })
    };
    let expected = "an entry for each sequence with few rows, and a row for each sequence with one row";
    let error = of_rows(1).expect_err("two sequences have one row each");
    assert!(error.to_string().contains(expected), "{error}");
    of_rows(2).expect("each sequence has its row");
}

#[test]
fn padding_rows_give_zeros_and_change_no_state() {
    let (weights, prompt) = (Weights::new(-2.0), Prompt::new(1, 20));
    with_layer(1, |scope, layer| {
        step(scope, layer, &weights, &[SequenceRows::of(&prompt, 0..10, 0)])?;
        let pass = scope.scope();
        let sequences = one_token_and_padding(&pass)?;
        let (row, width) = (&prompt.x[10 * SHAPE.channels..][..SHAPE.channels], SHAPE.channels);
        let x = pass.upload([2, width], &[row, &vec![f32::NAN; width]].concat())?;
        let conv = pass.upload([width, WIDTH], &weights.conv)?;
        let out: Vec<f32> = pass.download(&pass.causal_conv(&x, &conv, layer, &sequences)?)?;
        assert!(out[..width].iter().all(|x| x.is_finite()) && out[width..].iter().all(|x| *x == 0.0));
        Ok(())
    });
}

#[test]
#[should_panic(expected = "a slot that a sequence reads is written by another sequence")]
fn a_slot_that_another_sequence_overwrites_is_refused() {
    let (weights, prompt) = (Weights::new(-2.0), Prompt::new(1, 20));
    with_layer(1, |scope, layer| {
        step(scope, layer, &weights, &[SequenceRows::of(&prompt, 0..10, 0)])?;
        let other = SequenceRows { read: 0, ..SequenceRows::of(&prompt, 10..20, 1) };
        step(scope, layer, &weights, &[other, SequenceRows::of(&prompt, 0..5, 0)])
    });
}

#[test]
fn the_gated_norm_normalizes_each_head() {
    let (rows, heads, dim) = (5, 3, 20);
    let mut random = Random::new(3);
    let (x, gate, weight) = (random.floats(rows * heads * dim), random.floats(rows * heads * dim), random.floats(dim));
    let found = compute(2, |scope| {
        let [x, gate] = [&x, &gate].map(|numbers| scope.upload([rows, heads * dim], numbers));
        let out = scope.gated_rms_norm(&x?, &gate?, &scope.upload([dim], &weight)?, 1e-6)?;
        scope.download(&out)
    });
    let mut expected = Vec::new();
    for (x, gate) in x.chunks(dim).zip(gate.chunks(dim)) {
        let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / dim as f64;
        for ((x, gate), weight) in x.iter().zip(gate).zip(&weight) {
            let gate = f64::from(*gate);
            expected.push(f64::from(*x) / (mean + 1e-6).sqrt() * f64::from(*weight) * gate / (1.0 + (-gate).exp()));
        }
    }
    assert_close("gated norm", &found, &expected, 1e-6);
}

#[test]
fn sigmoid_gates_are_one_per_element_or_one_per_row() {
    let mut random = Random::new(4);
    let (x, gates) = (random.floats(7 * 33), random.floats(7 * 33));
    for columns in [33, 1] {
        let found = compute(1, |scope| {
            let (mut x, gate) = (scope.upload([7, 33], &x)?, scope.upload([7, columns], &gates[..7 * columns])?);
            scope.sigmoid_mul(&mut x, &gate)?;
            scope.download(&x)
        });
        let gate = |place: usize| if columns == 1 { gates[place / 33] } else { gates[place] };
        let sigmoid = |gate: f32| 1.0 / (1.0 + (-f64::from(gate)).exp());
        let expected: Vec<_> = x.iter().enumerate().map(|(place, x)| f64::from(*x) * sigmoid(gate(place))).collect();
        assert_close("sigmoid", &found, &expected, 1e-6);
    }
}

#[test]
fn rotary_turns_part_of_each_head_after_its_norm() {
    for case in RotaryKv::partial_cases() {
        let found = compute(2, |scope| case.run(scope, &mut Random::new(5)));
        let expected = case.expected(DType::F32, &mut Random::new(5));
        assert_close(&format!("{case:?}"), &found, &expected, 2e-5);
    }
}

#[test]
fn the_norm_offset_is_added_to_the_weights() {
    let mut random = Random::new(6);
    let (x, weight) = (random.floats(3 * 50), random.floats(50));
    let found = compute(1, |scope| {
        let (x, weight) = (scope.upload([3, 50], &x)?, scope.upload([50], &weight)?);
        let norm = RmsNorm { weight_offset: 1.0, ..RmsNorm::new(&weight, 1e-6) };
        scope.download(&scope.rms_norm(&x, norm)?)
    });
    let (x, weight) = (rounded(DType::F32, &x), rounded(DType::F32, &weight));
    let row = |x: &[f64]| -> Vec<f64> {
        let factor = (x.iter().map(|x| x * x).sum::<f64>() / 50.0 + 1e-6).sqrt().recip();
        x.iter().zip(&weight).map(|(x, weight)| x * factor * (1.0 + weight)).collect()
    };
    assert_close("norm", &found, &x.chunks(50).flat_map(row).collect::<Vec<_>>(), 1e-6);
}
